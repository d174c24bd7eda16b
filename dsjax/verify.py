"""Checks a checkpoint against recorded outputs (`golden.npz`), through both ways into the model.

`golden.npz` holds, for prompts i: `p{i}_ids` [S]; `p{i}_logits` [S, V] at every prompt position; `p{i}_greedy_ids` [G]
and `p{i}_greedy_logits` [G, V], row j being what greedy token j was chosen from; optionally `p{i}_mtp_logits` [S-1, V].
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax import checkpoint
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.load import keeps_stored, load_runner, resolve_dtype
from dsjax.model.build import assemble
from dsjax.request import Request, SamplingParams
from dsjax.runner.output import Sent, StepOutput
from dsjax.runner.runner import Runner
from dsjax.scheduler.plan import StepPlan

CHUNKS = (1, 2, 3, 5, 7, 16, 64)
ALL_MODES = ("full", "paged", *(f"chunk={n}" for n in CHUNKS), "token")
_ROWS = 8  # requests in one step in mode paged


@dataclass
class Golden:
    """One prompt's recorded outputs, and the largest differences found so far."""

    index: int
    ids: np.ndarray
    logits: np.ndarray
    greedy_ids: np.ndarray
    greedy_logits: np.ndarray
    mtp_logits: np.ndarray | None
    difference: float = 0.0
    mtp_difference: float = 0.0
    greedy: list[int] = field(default_factory=list)

    def expected(self, position: int) -> np.ndarray | None:
        """The logits after the token at `position`, where recorded."""
        if position < len(self.ids):
            return self.logits[position]
        beyond = position - len(self.ids) + 1
        return self.greedy_logits[beyond] if beyond < len(self.greedy_logits) else None

    def compare(self, position: int, got: np.ndarray, draft: np.ndarray | None = None) -> None:
        """Takes in the logits after the token at `position`, and the MTP block's."""
        want = self.expected(position)
        if want is not None:
            self.difference = max(self.difference, _distance(got, want))
        if draft is not None and self.mtp_logits is not None and position < len(self.mtp_logits):
            self.mtp_difference = max(self.mtp_difference, _distance(draft, self.mtp_logits[position]))


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    worst = float(np.max(np.abs(got - want)))
    return math.inf if math.isnan(worst) else worst


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt in one mode."""

    mode: str
    prompt: int
    num_tokens: int
    difference: float  # largest |logit - recorded logit|
    mtp_difference: float | None  # the same of the MTP block; None where nothing is recorded or loaded
    greedy_equal: bool

    def passes(self, atol: float) -> bool:
        return max(self.difference, self.mtp_difference or 0.0) <= atol and self.greedy_equal


def read_golden(path: Path) -> list[Golden]:
    """The prompts of a folder's golden.npz. Raises ConfigError if it is missing or incomplete."""
    file = path / "golden.npz"
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} has no golden.npz to verify against")
    with np.load(file) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    indices = sorted(int(m[1]) for name in found if (m := re.fullmatch(r"p(\d+)_ids", name)))
    if not indices:
        raise ConfigError(f"{file} holds no prompt (p0_ids, ...)")
    prompts = []
    for i in indices:
        missing = [n for n in ("logits", "greedy_ids", "greedy_logits") if f"p{i}_{n}" not in found]
        if missing:
            raise ConfigError(f"{file} lacks p{i}_{missing[0]}")
        fields = {n: found[f"p{i}_{n}"] for n in ("ids", "logits", "greedy_ids", "greedy_logits")}
        prompts.append(Golden(index=i, mtp_logits=found.get(f"p{i}_mtp_logits"), **fields))
    return prompts


def verify(
    path: Path, modes: Sequence[str] = ALL_MODES, *, dtype: str = "float32", weight_format: str = "auto", **options: Any
) -> Iterator[Result]:
    """Runs every prompt in every mode: full (whole-sequence forward on one device), paged (prompts whole, several in a
    step), chunk=N (N tokens a step) and token (one token a step in decode shape). `options` are `recording_runner`'s.
    Raises ConfigError."""
    config = ModelConfig.from_dir(path)
    prompts = read_golden(path)
    stepped = [mode for mode in modes if parse_mode(mode) is not None]
    if "full" in modes:
        yield from _verify_full(path, config, prompts, dtype, weight_format)
    if stepped:
        longest = max(len(p.ids) + len(p.greedy_ids) for p in prompts)
        with_mtp = _has_mtp(path, prompts)
        options |= {"dtype": dtype, "weight_format": weight_format, "with_mtp": with_mtp}
        runner, max_model_len = recording_runner(path, config, longest, **options)
        for mode in stepped:
            yield from verify_mode(mode, runner, config, max_model_len, prompts)


def parse_mode(mode: str) -> int | None:
    """Tokens a step in a paged mode, None for full. Raises ConfigError for another mode."""
    if mode == "full":
        return None
    if mode == "paged":
        return 1 << 30
    if mode == "token":
        return 1
    if match := re.fullmatch(r"chunk=([1-9]\d*)", mode):
        return int(match[1])
    raise ConfigError(f"mode={mode!r} must be full, paged, chunk=N or token")


def _has_mtp(path: Path, prompts: list[Golden]) -> bool:
    return checkpoint.has_mtp(path) and any(p.mtp_logits is not None for p in prompts)


def _verify_full(
    path: Path, config: ModelConfig, prompts: list[Golden], dtype: str, weight_format: str
) -> Iterator[Result]:
    with_mtp = _has_mtp(path, prompts)
    compute = resolve_dtype(dtype, jax.devices()[0].platform)
    keep = keeps_stored(weight_format, jax.devices()[0].platform)
    params = checkpoint.open_params(path, config, compute.name, include_mtp=with_mtp, stored=keep)
    graph, state = assemble(config, params, compute, with_mtp=with_mtp, stored=keep)

    @jax.jit
    def forward(state: nnx.State, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        model = nnx.merge(graph, state)
        streams = model.streams(ids)
        return model.logits(streams), model.mtp_logits(streams, ids) if with_mtp else None

    for prompt in prompts:
        ids = np.concatenate([prompt.ids, prompt.greedy_ids[:-1]]).astype(np.int32)
        # Causal, so padding at the end changes nothing before it: few lengths to compile.
        padded = np.zeros(max(16, 1 << (len(ids) - 1).bit_length()), np.int32)
        padded[: len(ids)] = ids
        logits, mtp = jax.tree.map(np.asarray, forward(state, jnp.asarray(padded)))
        logits = logits[: len(ids)]
        fresh = dataclasses.replace(prompt, difference=0.0, mtp_difference=0.0)
        for position, row in enumerate(logits):
            fresh.compare(position, row, None if mtp is None else mtp[min(position, len(mtp) - 1)])
        # With its own greedy tokens as input, choosing the recorded token everywhere is the greedy run.
        chosen = logits[len(prompt.ids) - 1 :].argmax(axis=-1)
        yield _result("full", fresh, bool((chosen == prompt.greedy_ids).all()), with_mtp)


class RecordingRunner:
    """A runner whose steps are compared with the recorded logits as they are read."""

    def __init__(self, runner: Runner, max_tokens: int, has_mtp: bool):
        self.runner, self.spec, self.max_tokens = runner, runner.spec, max_tokens
        self.num_shards, self.has_mtp, self.padding = runner.num_shards, has_mtp, runner.padding
        self.prompts: dict[str, Golden] = {}

    def dispatch(self, plan: StepPlan) -> tuple[list[tuple[str, int, int]], Sent]:
        rows = [(row.request.parent_id, row.start, row.num_new) for row in plan.rows]
        return rows, self.runner.dispatch(plan)

    def read(self, sent: tuple[list[tuple[str, int, int]], Sent]) -> StepOutput:
        rows, output = sent
        output = self.runner.read(output)
        assert output.logits is not None
        logits = np.asarray(output.logits)
        drafts = None if output.draft_logits is None else np.asarray(output.draft_logits)
        token = 0
        for request_id, start, num_new in rows:
            prompt = self.prompts[request_id]
            for i in range(num_new):
                # beyond a wrong token the recorded logits are of another text
                drawn = prompt.greedy[: max(0, start + i + 1 - len(prompt.ids))]
                if drawn == prompt.greedy_ids[: len(drawn)].tolist():
                    draft = None if drafts is None else drafts[token + i]
                    prompt.compare(start + i, logits[token + i], draft)
            token += num_new
        return output


def recording_runner(
    path: Path,
    config: ModelConfig,
    longest: int,
    *,
    cache: dict[str, Any] | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str = "float32",
    with_mtp: bool = False,
    **options: Any,
) -> tuple[RecordingRunner, int]:
    """A runner for sequences of up to `longest` tokens, and its max_model_len.

    `cache` sets fields of CacheConfig, `options` are `load.make_runner`'s.
    """
    max_tokens = 1 << max(6, (longest - 1).bit_length())
    fields = {"block_size": 16, "enable_prefix_caching": False, **(cache or {})}
    runner, max_model_len = load_runner(
        path,
        config,
        cache=CacheConfig(**fields, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(
            max_num_seqs=_ROWS,
            max_num_batched_tokens=max_tokens,
            max_model_len=min(config.max_position_embeddings, longest + 1),
        ),
        dtype=dtype,
        with_mtp=with_mtp,
        all_logits=True,
        fill=math.nan,  # a read of something unwritten must show
        **options,
    )
    return RecordingRunner(runner, max_tokens, with_mtp), max_model_len


def verify_mode(
    mode: str, runner: RecordingRunner, config: ModelConfig, max_model_len: int, prompts: list[Golden]
) -> Iterator[Result]:
    """Runs every prompt in a mode other than full, on `recording_runner`'s runner."""
    num_tokens = parse_mode(mode)
    assert num_tokens is not None
    rows = _ROWS if mode == "paged" else 1
    scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=min(num_tokens, runner.max_tokens))
    engine = Engine(
        config=EngineConfig(model="verify", scheduler=scheduler),
        model_config=config,
        runner=runner,  # type: ignore[arg-type]
        tokenizer=None,
        max_model_len=max_model_len,
    )
    runner.prompts = {
        str(p.index): dataclasses.replace(p, difference=0.0, mtp_difference=0.0, greedy=[]) for p in prompts
    }
    for prompt in prompts:
        params = SamplingParams(temperature=0, max_tokens=len(prompt.greedy_ids), ignore_eos=True)
        ids = prompt.ids.tolist()
        engine.add(Request(request_id=str(prompt.index), prompt_token_ids=ids, params=params))
    while engine.has_work():
        for event in engine.step():
            prompt = runner.prompts[event.request_id]
            prompt.greedy += event.token_ids
            if event.finished:
                yield _result(mode, prompt, prompt.greedy == prompt.greedy_ids.tolist(), runner.has_mtp)


def _result(mode: str, prompt: Golden, greedy_equal: bool, has_mtp: bool) -> Result:
    return Result(
        mode=mode,
        prompt=prompt.index,
        num_tokens=len(prompt.ids),
        difference=prompt.difference,
        mtp_difference=prompt.mtp_difference if has_mtp and prompt.mtp_logits is not None else None,
        greedy_equal=greedy_equal,
    )
