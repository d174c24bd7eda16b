"""Which data shard a request goes to.  [no jax]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """What a shard would be for one request. Tuples compare as shards are preferred: the least first.

    - `num_tokens`, all that the shard would have to compute: what the request's prefix hit there leaves of it, and what
      the running requests have left. In these terms a hit and a load weigh against each other: a hit is worth
      the tokens it saves, so it wins until the queue of work in front of it is longer than that. Decoding rows count a
      token each, hence of shards that only decode the one with fewest rows wins.
    - `usage`, the part of its fullest pool that requests hold: of equals, where preemption is farther away.
    - `num_held`, pages that are not free: of equals, where fewer cached prefixes are evicted. So an idle engine fills
      the caches of all shards.
    - `index` last, so that the order is total.
    """

    num_tokens: int
    usage: float
    num_held: int
    index: int


def preferred(candidates: Sequence[Candidate]) -> list[int]:
    """Shard indices in the order to try."""
    return [candidate.index for candidate in sorted(candidates)]
