"""Which data shard a request goes to.  [no jax]"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """What a shard would be for one request. Candidates compare as shards are preferred: the least is the first.

    - `num_tokens`, all that the shard would have to compute: what the request's prefix hit there leaves of it, and what
      the running requests have left. In these terms a hit and a load weigh against each other: a hit is worth the
      tokens it saves, so it wins until the work in front of it is more than that. Decoding rows count a token each, so
      of shards that only decode the one with the fewest rows wins.
    - `usage`, the part of the fullest pool that requests hold: of equals, where preemption is farther away.
    - `num_held`, pages that are not free: of equals, where fewer cached prefixes are evicted. So the shards of an idle
      engine all fill their caches.
    - `index`, so that the order is total.
    """

    num_tokens: int
    usage: float
    num_held: int
    index: int
    num_cached: int  # tokens of the request that its prefix hit on the shard saves
    has_budget: bool  # False: prompts being computed take all of the step being planned


def preferred(candidates: Sequence[Candidate]) -> list[int]:
    """Indices of the shards to try in this step, in order; none if the request had better wait for the next step.

    It had better wait where a shard without budget precedes all others that would take it and has a longer hit than
    they: by its `num_tokens`, waiting takes less than computing the hit again elsewhere. For a lower load alone nobody
    waits, nor for slots and pages, as nobody knows when running requests end.
    """
    longest = max((candidate.num_cached for candidate in candidates if candidate.has_budget), default=0)
    order = []
    for candidate in sorted(candidates):
        if candidate.has_budget:
            order.append(candidate.index)
        elif candidate.num_cached > longest:
            break
    return order
