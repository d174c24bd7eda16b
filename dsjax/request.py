"""Requests, sampling parameters and the events a request produces.  [no jax]

A `Request` is owned by the scheduler: nobody else writes its fields after `Engine.add`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsjax.errors import RequestError, invalid, shown
from dsjax.request_fields import biases, boolean, integer, integers, number, strings, wrong

MAX_LOGPROBS = 20  # vLLM's default for --max_logprobs; the width of the step's top-logprob output
MAX_TOP_K = (1 << 31) - 1  # of the step's integers; more than any vocabulary
MAX_STOP_STRINGS = 16  # a bound on host work a token; OpenAI allows 4
MAX_TEMPERATURE = 1e6  # every token is as likely as any other long before
REPETITION_PENALTY = 1e-3, 1e3  # with more the logits would leave float32's range
MAX_STOP_CHARS = 4096  # of one stop string; the automaton that finds them has a state for every character


class Status(enum.Enum):
    WAITING = "waiting"  # queued, or preempted and queued again
    RUNNING = "running"  # holds a slot and pages
    FINISHED = "finished"


class Path(enum.IntEnum):
    """Length class of a request, by prompt and expected output; what is colder gives way."""

    HOT = 0
    WARM = 1
    COLD = 2


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; names and defaults are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps the whole vocabulary. `seed` makes a request
    reproducible in any company: its random numbers depend on (seed, position) alone. `max_tokens`
    None means as many as `max_model_len` leaves. `logprobs`/`prompt_logprobs` ask for that many
    of the most likely tokens besides the chosen one. A `logit_bias` below -1e6 bans its token.
    Raises RequestError(INVALID_ARGUMENT) for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        for read, names in _FIELDS.items():
            for name in names:
                given = getattr(self, name)
                if given is not None or name not in _OPTIONAL:
                    value = read(name, given)
                    if value is not given:
                        object.__setattr__(self, name, value)

        def check(name: str, ok: bool, limit: str) -> None:
            if not ok:
                raise wrong(name, getattr(self, name), limit)

        for name in _FIELDS[number]:
            check(name, math.isfinite(getattr(self, name)), "it must be a finite number")
        check("n", 1 <= self.n <= 128, "it must be in [1, 128]")
        check("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"it must be in [0, {MAX_TEMPERATURE:g}]")
        check("top_p", 0 < self.top_p <= 1, "it must be in (0, 1]")
        check("top_k", self.top_k >= -1, "it must be 0 or -1 (all tokens) or the number of tokens to keep")
        check("top_k", self.top_k <= MAX_TOP_K, f"it must be at most {MAX_TOP_K}")
        check("min_p", 0 <= self.min_p <= 1, "it must be in [0, 1]")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "it must be in [-2, 2]")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "it must be in [-2, 2]")
        low, high = REPETITION_PENALTY
        check("repetition_penalty", low <= self.repetition_penalty <= high, f"it must be in [{low:g}, {high:g}]")
        check("min_tokens", self.min_tokens >= 0, "it must be 0 or more")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "it must be 1 or more, or absent")
        check(
            "min_tokens",
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"it must be at most max_tokens={shown(self.max_tokens)}",
        )
        check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"it must have at most {MAX_STOP_STRINGS} strings")
        check("stop", all(self.stop), "a stop string must not be empty")
        longest = max(map(len, self.stop), default=0)  # not shown whole: it may be megabytes
        if longest > MAX_STOP_CHARS:
            raise invalid(f"stop has a string of {longest} characters: at most {MAX_STOP_CHARS} are allowed")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"it must be in [0, {MAX_LOGPROBS}]")


# How each field is read from what was given.
_FIELDS: dict[Callable[[str, Any], Any], tuple[str, ...]] = {
    integer: ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"),
    number: ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    boolean: ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    strings: ("stop",),
    integers: ("stop_token_ids",),
    biases: ("logit_bias",),
}
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the token itself, and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence to complete (one of `params.n`), with the scheduler's bookkeeping below the line."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # lower goes first, as in vLLM; matters to the policies `priority` and `shortest`
    tenant: str = ""  # whose limits and weight count; "" is the tenant of all who name none
    session_id: str = ""  # a conversation whose next turn will begin like this one: a hint for the cache's tiers
    arrival_s: float = 0.0  # time.monotonic
    deadline_s: float | None = None  # time.monotonic; None is no deadline
    index: int = 0  # which of params.n
    parent_id: str = ""  # the id the caller knows; set by Engine.add

    # --- owned by the scheduler -------------------------------------------------------------
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt + output known on the host
    num_pending: int = 0  # sampled on the device, not yet read
    num_computed: int = 0  # tokens whose cache entries were written by a dispatched step
    num_cached: int = 0  # prompt tokens that came from the prefix cache when first scheduled
    shard: int = -1  # data shard, while RUNNING
    slot: int = -1  # row slot on the shard, held while RUNNING
    path: Path = Path.HOT
    expected_tokens: int = 0  # prompt and expected output
    key_s: float = 0.0  # arrival and handicap: who goes first, also when preempted
    number: int = -1  # in the order of `add`
    num_preemptions: int = 0
    num_reclaims: int = 0  # of those, for requests that waited
    held: float = 0.0  # what the last one freed of its shard's fullest pool, in [0, 1]
    awaited: bytes = b""  # what it can use of the cache's tiers and is on its way; b"" if it waits for nothing there
    awaits_until_s: float = 0.0  # how long; 0 before its turn has come
    sibling: Request | None = None  # for n > 1: wait until this one's prompt is in the cache
    seed: int = 0  # resolved: params.seed + index, or drawn once at add
    stop_ids: frozenset[int] = frozenset()  # ids that end it: stop_token_ids, and EOS unless ignored; set at add
    max_total_tokens: int = 0  # prompt and output together; set at add
    num_prefill_tokens: int = 0  # tokens it had when it got its slot
    token_s: float = 0.0  # when its last token was read
    first_of_stay: bool = True  # no step dispatched since it got its slot

    def __post_init__(self):
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        if not self.parent_id:
            self.parent_id = self.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def order(self) -> tuple[float, int]:
        """Smaller goes first."""
        return self.key_s, self.number

    @property
    def reads_prefix_cache(self) -> bool:
        return self.params.prompt_logprobs is None  # a hit would leave out the positions asked about

    @property
    def num_tokens(self) -> int:
        """Tokens it has, counting those sampled but not yet read."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


@dataclass(slots=True)  # not frozen, which makes it take four times as long; the engine makes one for each token
class TokenEvent:
    """What one step added to one sequence. The last event of a sequence has `finish_reason` or `error`."""

    request_id: str  # the caller's id
    index: int = 0
    token_ids: tuple[int, ...] = ()  # new ids
    text: str = ""  # new visible text; "" while a character or a possible stop string is incomplete
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each new id, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, on the first event; [0] is None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None
