"""What a measurement sends: requests from a workload file, random ones, and when each one arrives.  [no jax]

A workload file is a JSON list of {"id": int, "prompt": [token ids], "max_tokens": int}, so that other engines can be
given exactly the same work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.metrics import Record
from dsjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One request: its name in the workload, its prompt and how many tokens to make."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int


def load(path: str | Path) -> list[WorkItem]:
    """Reads a workload file. Raises ConfigError naming the file, and the entry and field that cannot be used."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: it must be a list of at least one entry")
    items = []
    for position, entry in enumerate(entries):
        for name in ("id", "prompt", "max_tokens"):
            if not isinstance(entry, dict) or name not in entry:
                raise ConfigError(f"{path}: entry {position} lacks {name!r}")
        prompt, numbers = entry["prompt"], (entry["id"], entry["max_tokens"])
        if not isinstance(prompt, list) or not all(isinstance(number, int) for number in (*prompt, *numbers)):
            raise ConfigError(
                f"{path}: entry {position} needs a list of ids as prompt, and numbers as id and max_tokens"
            )
        if not prompt or entry["max_tokens"] < 1:
            raise ConfigError(
                f"{path}: entry {position} needs a prompt of at least 1 token and max_tokens of at least 1"
            )
        items.append(WorkItem(id=entry["id"], prompt=tuple(prompt), max_tokens=entry["max_tokens"]))
    if len({item.id for item in items}) != len(items):
        raise ConfigError(f"{path}: ids are not unique")
    return items


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises ConfigError if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read as JSON: {error}") from error


def save(path: str | Path, items: Sequence[WorkItem]) -> None:
    """Writes a workload file that `load` reads back to equal items."""
    entries = [{"id": item.id, "prompt": list(item.prompt), "max_tokens": item.max_tokens} for item in items]
    Path(path).write_text(json.dumps(entries), encoding="utf-8")


def make_random(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
    first_id: int = 3,
) -> list[WorkItem]:
    """Random token ids in [first_id, vocab_size), so that the special tokens at the start are left out.

    Lengths are drawn evenly from [len * (1 - range_ratio), len * (1 + range_ratio)], as in vLLM's random data set;
    `prefix_len` further tokens at the start are the same in every prompt.
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"range_ratio={range_ratio} must be in [0, 1)")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, math.floor(mean * (1 - range_ratio))), math.ceil(mean * (1 + range_ratio))
        return rng.integers(low, high + 1, size=num_prompts).tolist()

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(first_id, vocab_size, size=count).tolist())

    inputs, outputs, prefix = lengths(input_len), lengths(output_len), tokens(prefix_len)
    return [
        WorkItem(id=i, prompt=prefix + tokens(n), max_tokens=m)
        for i, (n, m) in enumerate(zip(inputs, outputs, strict=True))
    ]


def make_mix(
    parts: Sequence[tuple[int, int, int]],  # (how many, prompt length, answer length) of each class
    *,
    vocab_size: int,
    range_ratio: float = 0.0,
    seed: int = 0,
) -> list[WorkItem]:
    """Random requests of several classes in a random order; ids count up class by class."""
    items: list[WorkItem] = []
    for part, (num, input_len, output_len) in enumerate(parts):
        some = make_random(
            num_prompts=num,
            input_len=input_len,
            output_len=output_len,
            vocab_size=vocab_size,
            range_ratio=range_ratio,
            seed=seed * len(parts) + part,
        )
        items += [replace(item, id=len(items) + i) for i, item in enumerate(some)]
    order = np.random.default_rng(seed).permutation(len(items))
    return [items[i] for i in order]


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Users who talk: each turn's prompt is the conversation so far and something new, sent after some thought."""

    num_users: int
    num_turns: int
    first_len: int  # tokens of the first prompt
    turn_len: int  # new tokens of a later one
    output_len: int
    vocab_size: int
    think_s: float = 0.0  # mean of the time (exponential) between an answer and the next prompt
    start_s: float = 0.0  # users begin evenly over this time
    range_ratio: float = 0.0  # of all lengths, as in `make_random`
    seed: int = 0

    def begin(self) -> tuple[list[WorkItem], list[float]]:
        """Every user's first turn, and when it arrives."""
        items = [self._item(user, 0, ()) for user in range(self.num_users)]
        return items, [self.start_s * user / self.num_users for user in range(self.num_users)]

    def follow(self, item: WorkItem, record: Record) -> tuple[float, WorkItem] | None:
        """The user's next turn and the seconds until then; None after the last, or an answer that failed."""
        user, turn = divmod(item.id, self.num_turns)
        if turn + 1 == self.num_turns or not record.ok:
            return None
        rng = np.random.default_rng((self.seed, user, turn, 1))
        return float(rng.exponential(self.think_s)), self._item(user, turn + 1, (*item.prompt, *record.token_ids))

    def _item(self, user: int, turn: int, before: tuple[int, ...]) -> WorkItem:
        rng = np.random.default_rng((self.seed, user, turn))
        new, output = self.turn_len if turn else self.first_len, self.output_len
        low, high = 1 - self.range_ratio, 1 + self.range_ratio
        num, max_tokens = (max(1, round(mean * rng.uniform(low, high))) for mean in (new, output))
        prompt = before + tuple(rng.integers(3, self.vocab_size, size=num).tolist())
        return WorkItem(id=user * self.num_turns + turn, prompt=prompt, max_tokens=max_tokens)


def arrival_times(num: int, request_rate: float, seed: int = 0) -> list[float]:
    """Seconds from the start at which each of `num` requests arrives: all 0 at an infinite rate, else Poisson."""
    if not request_rate > 0:
        raise ValueError(f"request_rate={request_rate} must be more than 0 requests a second, or inf")
    if math.isinf(request_rate):
        return [0.0] * num
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, size=num)
    # the first request arrives at once, so that a low rate does not begin with an idle machine
    return np.concatenate([[0.0], np.cumsum(gaps)[:-1]]).tolist() if num else []
