"""How `dsjax-client` shows an answer: text on stdout, what else there is to say on stderr.  [no jax]"""

from __future__ import annotations

import sys

from servers import convert
from servers.proto.dsjax.v1 import inference_pb2 as pb

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """One answer is shown as it comes; of several, each when it is complete, under its number."""

    def __init__(self, n: int):
        self._several = n > 1
        self._held: dict[int, list[str]] = {}
        self._dim = False
        self._color = sys.stdout.isatty()

    def show(self, output: pb.Output, chat: bool, whole: bool = False) -> None:
        if not chat:
            pieces = [output.text]
        else:
            pieces = [self._style(True, output.chat.reasoning_content), self._style(False, output.chat.content)]
            pieces += [f"\n{call.name}({call.arguments})" for call in output.chat.tool_calls]
        if not self._several:
            print("".join(pieces), end="", flush=True)
            return
        self._held.setdefault(output.index, []).extend(pieces)
        if output.finish_reason or whole:
            print(f"[{output.index}] {''.join(self._held.pop(output.index))}", flush=True)

    def _style(self, dim: bool, text: str) -> str:
        if not text or dim == self._dim:
            return text
        self._dim = dim
        gap = "" if dim else "\n\n"  # between reasoning and answer
        return f"{(_DIM if dim else _PLAIN) if self._color else ''}{gap}{text}"

    def end(self) -> None:
        print(_PLAIN if self._dim and self._color else "", flush=True)


class Logprobs:
    """What --logprobs and --prompt_logprobs ask for: a line a token, after the answer, so as not to tear it up."""

    def __init__(self):
        self._tokens: dict[str, list[pb.TokenLogprobs]] = {}

    def add(self, response: pb.GenerateResponse) -> None:
        self._tokens.setdefault("prompt", []).extend(response.prompt_logprobs.positions)
        for output in response.outputs:
            self._tokens.setdefault(str(output.index), []).extend(output.logprobs)

    def show(self) -> None:
        for name, tokens in self._tokens.items():
            for token in tokens:
                print(f"[{name}] {_logprob_words(token)}", file=sys.stderr)


def _logprob_words(token: pb.TokenLogprobs) -> str:
    if not token.HasField("logprob"):
        return f"token {token.token_id} has none: nothing comes before it"
    top = zip(token.top_token_ids, token.top_logprobs, strict=True)
    likely = ", ".join(f"{token_id} {logprob:.4f}" for token_id, logprob in top)
    words = f"token {token.token_id} logprob {token.logprob:.4f} rank {token.rank}"
    return f"{words}, most likely {likely}" if likely else words


def print_usage(response: pb.GenerateResponse, output: pb.Output) -> None:
    usage = response.usage
    print(
        f"\n[{output.index}] {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{output.completion_tokens} completion tokens, finished by {convert.FINISH_NAMES[output.finish_reason]}",
        file=sys.stderr,
    )
