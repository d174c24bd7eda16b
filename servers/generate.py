"""`dsjax-generate`: answers a file of prompts offline, with a progress bar, into JSON lines.

A prompt file is text (- is stdin), one prompt a line, or (named *.jsonl) JSON lines with `prompt`, `prompt_token_ids`
or `messages`, and if wanted `request_id` and `sampling_params`, whose fields win over the flags. Answers are written in
the order of the prompts, each as soon as those before it are there; a prompt that the engine refuses gets `error`. Exit
code 0, 1 if any prompt got an error, 2 for a wrong flag or file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from absl import flags
from tqdm import tqdm

from dsjax.chat import ChatStrings, encode_chat
from dsjax.errors import ConfigError, ErrorCode, RequestError, invalid
from dsjax.prompt_len import check_texts
from dsjax.request import Request, SamplingParams, TokenEvent, TokenLogprobs
from servers import flags as server_flags
from servers import prompts
from servers.engine_like import EngineLike
from servers.main import MakeEngine, ReadStrings, make_engine, read_chat_strings

log = logging.getLogger("dsjax.generate")
PROGRAM = "dsjax-generate"
USAGE = "dsjax-generate --input=prompts.txt [--output=answers.jsonl] [--model=FOLDER] [--max_tokens=N]"
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_FIELDS = (*_PROMPT_FIELDS, "request_id", "sampling_params")


@dataclass
class Job:
    """One prompt of the file and what became of it."""

    request_id: str
    prompt: dict[str, Any]  # the one prompt field
    params: SamplingParams
    token_ids: list[int] | None = None  # of the prompt, once encoded
    outputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    error: RequestError | None = None
    num_finished: int = 0

    @property
    def done(self) -> bool:
        return self.error is not None or self.num_finished == self.params.n

    def add(self, event: TokenEvent) -> None:
        if event.error is not None:
            self.error = event.error
            return
        out = self.outputs.setdefault(event.index, {"index": event.index, "text": "", "token_ids": []})
        out["text"] += event.text
        out["token_ids"] += event.token_ids
        if event.logprobs:
            out.setdefault("logprobs", []).extend(map(_logprob, event.logprobs))
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = [entry and _logprob(entry) for entry in event.prompt_logprobs]
        if event.finish_reason is not None:
            out["finish_reason"], out["matched_stop"] = event.finish_reason.value, event.matched_stop
            self.num_finished += 1
        self.usage["prompt_tokens"], self.usage["cached_tokens"] = event.num_prompt_tokens, event.num_cached_tokens

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"request_id": self.request_id, **self.prompt}
        if self.error is not None:
            return out | {"error": {"code": self.error.code.value, "message": self.error.message}}
        outputs = [self.outputs[index] for index in sorted(self.outputs)]
        usage = self.usage | {"completion_tokens": sum(len(output["token_ids"]) for output in outputs)}
        extra = {} if self.prompt_logprobs is None else {"prompt_logprobs": self.prompt_logprobs}
        return out | {"outputs": outputs, "usage": usage} | extra


def main(
    argv: Sequence[str] | None = None,
    make_engine: MakeEngine = make_engine,
    read_chat_strings: ReadStrings = read_chat_strings,
) -> int:
    """The console script. Tests pass the functions, to use a fake engine."""
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv, make_engine, read_chat_strings))


def _main(argv: Sequence[str], make_engine: MakeEngine, read_chat_strings: ReadStrings) -> int:
    values = flags.FlagValues()
    flags.DEFINE_string("input", None, "file of prompts: text lines (- is stdin), or *.jsonl", flag_values=values)
    flags.DEFINE_string("output", "-", "file of answers; - is stdout", flag_values=values)
    flags.DEFINE_boolean("progress", True, "show progress bars on stderr", flag_values=values)
    server_flags.define_engine_flags(values)
    server_flags.define_sampling_flags(values)
    server_flags.parse(values, argv, USAGE)
    if values.input is None:
        raise ConfigError("input is absent: name a file of prompts with --input")
    config = server_flags.engine_config(values)
    defaults = server_flags.sampling_params(values, skip=("seed",))  # --seed is the engine's, and gives each its own
    jobs = read_jobs(values.input, defaults)
    server_flags.log_to_stderr()
    log.info("config: %s", server_flags.config_json(engine=config))
    with _opened(values.output) as out:
        if not jobs:
            log.info("input=%r holds no prompt: nothing is to be done", values.input)
            return 0
        strings = read_chat_strings(config)
        engine = make_engine(config)
        engine.warm_up(values.progress)
        with tqdm(total=len(jobs), unit="prompt", disable=not values.progress) as bar:
            for job in answer(engine, strings, jobs):
                out.write(json.dumps(job.to_dict(), ensure_ascii=False) + "\n")
                out.flush()
                bar.update()
    num_errors = sum(job.error is not None for job in jobs)
    if num_errors:
        print(
            f"{PROGRAM}: {num_errors} of {len(jobs)} prompts got an error, see `error` in the output", file=sys.stderr
        )
    return 1 if num_errors else 0


def read_jobs(path: str, defaults: SamplingParams) -> list[Job]:
    """The prompts of a file, or of stdin for "-". Raises ConfigError that names the line."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"input={path!r} cannot be read: {error}") from error
    is_json = path.endswith(".jsonl")
    jobs: list[Job] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            job = _read_json(line, str(number), defaults) if is_json else Job(str(number), {"prompt": line}, defaults)
        except (ValueError, TypeError, RequestError) as error:
            raise ConfigError(f"line {number} of input={path!r} cannot be used: {error}") from error
        jobs.append(job)
    ids = [job.request_id for job in jobs]
    twice = next((i for i in ids if ids.count(i) > 1), None) if len(set(ids)) < len(ids) else None
    if twice is not None:
        raise ConfigError(f"request_id={twice!r} stands twice in input={path!r}: each must be its own")
    return jobs


def _read_json(line: str, request_id: str, defaults: SamplingParams) -> Job:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("it must be a JSON object")
    unknown = sorted(set(raw) - set(_FIELDS))
    if unknown:
        raise ValueError(f"field {unknown[0]!r} is unknown: {', '.join(_FIELDS)} are known")
    prompt = {name: raw[name] for name in _PROMPT_FIELDS if name in raw}
    if len(prompt) != 1:
        raise ValueError(f"it must have exactly one of {', '.join(_PROMPT_FIELDS)}")
    params = dict(raw.get("sampling_params") or {})
    if "logit_bias" in params:  # JSON has no integer keys
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return Job(str(raw.get("request_id", request_id)), prompt, dataclasses.replace(defaults, **params))


def answer(engine: EngineLike, strings: ChatStrings, jobs: Sequence[Job]) -> Iterator[Job]:
    """Runs the jobs, as many at once as the engine's queue takes, and yields them in order as they are done."""
    waiting, live, unwritten = deque(jobs), {}, deque(jobs)
    while unwritten:
        while waiting:
            job = waiting[0]
            try:
                if job.token_ids is None:
                    job.token_ids = _token_ids(engine, strings, job.prompt)
                engine.add(Request(request_id=job.request_id, prompt_token_ids=job.token_ids, params=job.params))
                live[job.request_id] = job
            except RequestError as error:
                if error.code is ErrorCode.RESOURCE_EXHAUSTED and live:
                    break  # the queue is full: a step makes room
                job.error = error
            waiting.popleft()
        if engine.has_work():
            for event in engine.step():
                job = live.get(event.request_id)
                if job is None:
                    continue  # it has an error already
                job.add(event)
                if job.done:
                    del live[event.request_id]
        while unwritten and unwritten[0].done:
            yield unwritten.popleft()


def _token_ids(engine: EngineLike, strings: ChatStrings, prompt: dict[str, Any]) -> list[int]:
    if "prompt_token_ids" in prompt:
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise invalid("prompt_token_ids must be a list of token ids")
        return ids
    tokenizer = prompts.tokenizer_of(engine, next(iter(prompt)))
    if "messages" in prompt:
        return encode_chat(
            tokenizer,
            prompt["messages"],
            max_model_len=engine.max_model_len,
            strings=strings,
            reply_after_system=True,
        )
    if not isinstance(prompt["prompt"], str):
        raise invalid("prompt must be a string")
    check_texts(tokenizer, [prompt["prompt"]], engine.max_model_len)
    return tokenizer.encode(prompt["prompt"])


def _logprob(entry: TokenLogprobs) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    if path == "-":
        yield sys.stdout
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below; its errors are those of the flag)
    except OSError as error:
        raise ConfigError(f"output={path!r} cannot be written: {error}") from error
    with file:
        yield file


if __name__ == "__main__":
    sys.exit(main())
