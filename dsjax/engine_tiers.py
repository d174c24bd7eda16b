"""What the engine does for the tiers of its cache between steps: takes what has come down, and heeds hints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import CacheManager
from dsjax.cache.tiers import Tiers, TierStats
from dsjax.request import Request
from dsjax.runner.runner import Runner
from dsjax.scheduler.plan import ShardPlan, StepPlan
from dsjax.scheduler.swap import SwapCosts

MAX_SESSIONS = 4096  # whose last tokens are remembered; the one not heard of for longest goes
MAX_HINTS = 256  # that wait for the disk; the oldest goes


class EngineTiers:
    """Without `tiers`, every method has nothing to do."""

    def __init__(self, tiers: Tiers | None, caches: Sequence[CacheManager], runner: Runner):
        self.tiers, self.caches, self.runner = tiers, caches, runner
        self._sessions: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()  # (salt, session id) -> int32 tokens
        self._hints: OrderedDict[bytes, tuple[list[int], str]] = OrderedDict()  # what waits for the disk, by record

    def stats(self) -> TierStats:
        return self.tiers.stats() if self.tiers is not None else TierStats()

    def tend(self, costs: SwapCosts) -> None:
        """Takes what has arrived from the device and the disk. Before each step."""
        if self.tiers is None:
            return
        costs.bytes_per_s = self.runner.host_bytes_per_s
        self._take()
        self.tiers.poll()
        for awaited, (tokens, salt) in list(self._hints.items()):
            if not self.tiers.is_coming(awaited):
                del self._hints[awaited]
                self._promote(tokens, salt)

    def _take(self, wait: bool = False) -> None:
        assert self.tiers is not None
        for key, arrays in self.runner.downloaded(wait):
            self.tiers.put(key, arrays)

    def move(self) -> None:
        """Sends moves that no step takes along, as when the engine is about to be idle."""
        if self.tiers is not None:
            plan = StepPlan(shards=tuple(ShardPlan(**cache.take_moves()._asdict()) for cache in self.caches))
            if any(part.downloads or part.copies or part.uploads for part in plan.shards):
                self.runner.move(plan)

    def remember(self, request: Request) -> None:
        """Notes the tokens that a session's next turn begins with."""
        if self.tiers is None or not request.session_id:
            return
        name = request.cache_salt, request.session_id
        self._sessions[name] = np.asarray(request.token_ids[: request.num_computed], np.int32)
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def prefetch(self, token_ids: Sequence[int], session_id: str, cache_salt: str) -> bool:
        """See `Engine.prefetch`."""
        if self.tiers is None:
            return False
        if not token_ids and (cache_salt, session_id) in self._sessions:
            self._sessions.move_to_end((cache_salt, session_id))
            token_ids = self._sessions[cache_salt, session_id].tolist()
        if not token_ids:
            return False
        tokens = [*token_ids, 0]  # what is hinted at goes on: a token more, which is always computed
        hashes = UnitHashes(cache_salt, self.caches[0].spec.unit_tokens)
        known = max(cache.match(tokens, cache_salt, hashes).num_tokens for cache in self.caches)
        awaited = self.caches[0].want(tokens, hashes, known)
        if awaited:
            self._hints[awaited] = tokens, cache_salt
            if len(self._hints) > MAX_HINTS:
                self._hints.popitem(last=False)
            return True
        return self._promote(tokens, cache_salt)

    def _promote(self, tokens: Sequence[int], salt: str) -> bool:
        """Brings a prefix up on the data shard with most room, unless one has it."""
        if not self.tiers:
            return False
        longest = max(cache.match(tokens, salt).num_tokens for cache in self.caches)
        emptiest = max(self.caches, key=lambda cache: cache.num_free + cache.num_cached)
        found = self.tiers.find(tokens, UnitHashes(salt, emptiest.spec.unit_tokens))
        if found is None or found.num_tokens < longest + emptiest.spec.unit_tokens:
            return False
        moved = emptiest.promote(tokens, salt) > 0
        self.move()
        return moved

    @property
    def has_hints(self) -> bool:
        """Whether something prefetched is still to come from disk."""
        return bool(self._hints)

    def forget(self) -> None:
        """Forgets everything below the device, also what is on its way."""
        if self.tiers is not None:
            self.runner.downloaded(wait=True)
            self._sessions.clear()
            self._hints.clear()
            self.tiers.clear()

    def close(self, *, keep: bool) -> None:
        """Writes to disk what is there and, with `keep`, what is on the device; waits for it."""
        if self.tiers is None:
            return
        if keep and self.tiers.disk is not None:
            for cache in self.caches:
                self._take(wait=True)
                for _ in cache.move_each_down():  # one by one: together they might not fit beside the pools
                    self.move()
                    self._take(wait=True)
                    self.tiers.flush()
        self.tiers.close()
