"""Who goes first, who gives way, and how much of a step is whose: pure functions of configs and requests.  [no jax]"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsjax.request import Path, Request
from dsjax.serving_config import SchedulerConfig

MAX_RECLAIMS = 2  # a request gives way to more urgent new ones so often, so that it ends some day


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a step of a data shard may hold now: at most the config's limits, less when feedback says so."""

    max_num_batched_tokens: int
    max_num_seqs: int  # rows beyond which no request is admitted; those that run go on
    chunk_tokens: int = 0  # most prompt tokens of one request in a step; 0 is no limit

    @classmethod
    def of(cls, config: SchedulerConfig) -> Limits:
        return cls(max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs)


def path_of(config: SchedulerConfig, num_tokens: int) -> Path:
    """The path of a request whose prompt and expected output have so many tokens."""
    limits = (path.max_tokens for path in config.paths)
    return next(path for path, most in zip(Path, limits, strict=True) if not most or num_tokens < most)


def priority_of(config: SchedulerConfig, request: Request) -> int:
    """Its priority, as far as the policy knows priorities."""
    return 0 if config.scheduling_policy == "fcfs" else request.priority


def handicap_s(config: SchedulerConfig, request: Request) -> float:
    """Seconds that count as if the request had arrived so much later.

    Of two waiting requests of a tenant the one with the smaller arrival + handicap goes first. So one is overtaken only
    by those that arrive less than the difference of their handicaps after it, whatever else happens.
    """
    seconds = priority_of(config, request) * config.priority_step_s
    if config.scheduling_policy == "shortest":
        seconds += min(config.max_overtake_s, config.length_penalty * request.expected_tokens)
    return seconds


def row_limit(config: SchedulerConfig, path: Path, max_num_seqs: int) -> int:
    """Rows that requests of this path and colder ones may have together, unless none of them runs."""
    own = config.paths[path]
    return min(max_num_seqs, own.max_num_seqs or max(1, math.floor(own.share * max_num_seqs)))


def chunk_limit(config: SchedulerConfig, limits: Limits, path: Path) -> int:
    """Most prompt tokens of one request in a step."""
    if not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    given = [n for n in (config.paths[path].chunk_tokens, limits.chunk_tokens) if n]
    return min([*given, config.max_num_batched_tokens])


def prompt_budget(config: SchedulerConfig, path: Path, budget: int) -> int:
    """Of a step's `budget`, what prompts of a path may take while requests of other paths want some."""
    if not config.enable_chunked_prefill:
        return budget
    return max(1, math.floor(config.paths[path].budget_share * budget))


def victim(config: SchedulerConfig, candidates: Iterable[tuple[Request, int]]) -> Request | None:
    """Who is preempted: the least urgent, of those the one that loses least work, of those the last.

    Candidates are (request, tokens to compute again).
    """
    worst = max(candidates, key=lambda c: (priority_of(config, c[0]), -c[1], c[0].order), default=None)
    return worst[0] if worst else None


def gives_way(config: SchedulerConfig, running: Request, to: Request, over_share: bool) -> bool:
    """Whether a running request is preempted so that a waiting one can start.

    It is if it is less urgent, or of a colder path and that path holds more than its share (`over_share`).
    """
    if running.num_reclaims >= MAX_RECLAIMS or not config.enable_preemption:
        return False
    return priority_of(config, running) > priority_of(config, to) or (over_share and running.path > to.path)


def length_group(ratio: float, num_tokens: int) -> int:
    """Contexts of the same group are within `ratio` of each other."""
    return math.floor(math.log(max(1, num_tokens), ratio) + 1e-9)


def group_in_turn(groups: Sequence[int], turn: int) -> int:
    """Which of the groups present has its rows in step number `turn`."""
    present = sorted(set(groups))
    return present[turn % len(present)]
