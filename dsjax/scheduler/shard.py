"""One data shard: its running requests, its cache, and its part of each step.  [no jax]

A step is planned in this order: `begin`, `grant_decodes`, then for each waiting request that may start
`grant_prompts(before=it)` and `admit`, at last `grant_prompts` and `grant_rest`, and `take_plan`. So decoding rows get
their token first, prompts share what is left in the order of their requests, running or not, and nothing stays unused.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import CacheManager
from dsjax.config import SchedulerConfig
from dsjax.request import Path, Request, Status
from dsjax.scheduler import policy
from dsjax.scheduler.census import PATHS, Census
from dsjax.scheduler.placement import Candidate
from dsjax.scheduler.plan import RowPlan, Rows, ShardPlan
from dsjax.scheduler.policy import Limits
from dsjax.scheduler.streak import Streak
from dsjax.scheduler.swap import SwapCosts

LAST = (math.inf, 0)  # an order after all requests'
CALM = 0.95  # of preemption_threshold: below it requests are admitted again
_order = operator.attrgetter("order")


class Shard:
    """Plans one step at a time."""

    def __init__(self, index: int, config: SchedulerConfig, cache: CacheManager, costs: SwapCosts | None = None):
        self.index, self.config, self.cache = index, config, cache
        self._costs = costs or SwapCosts(config.preemption_mode)
        self.running: list[Request] = []  # in order: nobody is preempted for the growth of one that comes later
        self._census = Census(config, cache.share_of)  # of them
        self._victims: list[Request] = []  # preempted while the step is planned
        self._grants: dict[Request, int] = {}  # tokens of the step being planned
        self._streak: Streak | None = None  # while the same rows decode
        self._prompts: deque[Request] = deque()  # those with more than a token to compute that got none yet, in order
        self._unfinished: list[Request] = []  # all that have more than a token to compute
        self._budget = 0  # tokens left in it
        self._path_budget = [0] * len(Path)  # of those, for prompts of each path while others want some
        self._path_budgets = lru_cache(1)(lambda num: [policy.prompt_budget(config, path, num) for path in Path])
        self._limits = Limits.of(config)
        self._is_short = False  # pages were missing: nobody is admitted
        self._turn = 0  # of length groups
        self.num_swaps = 0  # preemptions whose state was kept

    # --- looking -------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a new request may come once a step has budget for it."""
        return not self._is_short and len(self.running) < self._limits.max_num_seqs

    @property
    def is_open(self) -> bool:
        """Whether the step being planned may take a new request."""
        return self.has_room and self._budget > 0

    @property
    def has_budget(self) -> bool:
        return self._budget > 0

    @property
    def has_rows(self) -> bool:
        return bool(self._grants)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that running requests have and no dispatched step computed: prompts' ends, and one a decoding row."""
        if self._streak:
            return len(self.running)
        return sum(request.num_tokens - request.num_computed for request in self.running)

    def candidate(self, request: Request, hashes: UnitHashes) -> Candidate:
        """What this shard would be for a waiting request."""
        cache, hit = self.cache, 0
        if request.reads_prefix_cache:
            hit = cache.match(request.token_ids, request.cache_salt, hashes).num_tokens
        return Candidate(
            num_tokens=self.num_tokens_left + request.num_tokens - hit,
            usage=cache.usage,
            num_held=cache.num_total - cache.num_free,
            index=self.index,
            num_cached=hit,
            has_budget=self._budget > 0,
        )

    def path_is_full(self, path: Path) -> bool:
        """Whether requests of this path, or with them a hotter one, have the budget, rows or pages that are theirs."""
        return self._path_budget[path] <= 0 or self._census.is_full(path, self._limits.max_num_seqs)

    # --- the step being planned ----------------------------------------------------------------

    def begin(self, limits: Limits) -> None:
        """Begins a step; preempts what is above the threshold."""
        self._limits, self._grants, self._victims = limits, {}, []
        threshold = self.config.preemption_threshold
        is_set = threshold < 1  # else no usage is above it
        self._is_short = is_set and self._is_short and self.cache.usage > CALM * threshold
        while is_set and self.cache.usage > threshold and len(self.running) > 1 and self.config.enable_preemption:
            self._preempt(self._victim(self.running[1:]))
            self._is_short = True
        # Each running row may have its token, whatever feedback says: it admits fewer, and some end.
        budget = max(limits.max_num_batched_tokens, len(self.running))
        self._budget = budget if self.config.enable_chunked_prefill else self.config.max_num_batched_tokens
        self._path_budget = self._path_budgets(self._budget).copy()
        self._prompts, self._unfinished = deque(), []

    def grant_decodes(self) -> None:
        """A token for each row that has one to compute, in order: pages that are missing come from later ones."""
        streak = self._streak
        if streak and len(streak.rows) <= self._budget and self._may_all_grow() and streak.grant():
            self._grants = streak.grants  # who changes them ends the streak first
            self._budget -= len(streak.rows)
            return
        self._end_streak()
        ratio, decoding = self.config.length_groups, []
        for request in self.running:
            num_tokens = request.num_tokens
            left = num_tokens - request.num_computed
            if left == 0 or num_tokens >= request.max_total_tokens:
                continue  # nothing to compute, or the token in flight is its last
            (self._unfinished if left > 1 else decoding).append(request)
        self._prompts.extend(self._unfinished)
        if ratio and decoding:
            groups = [policy.length_group(ratio, request.num_tokens) for request in decoding]
            chosen = policy.group_in_turn(groups, self._turn)
            decoding = [request for request, group in zip(decoding, groups, strict=True) if group == chosen]
            self._turn += 1
        for request in decoding:
            if request.status is Status.RUNNING and self._budget:  # not preempted for one before it
                self._grant_token(request)

    def _end_streak(self) -> None:
        """Before anything is asked of requests that the streak has not written down."""
        if self._streak:
            self._streak.end()
            self._streak = None

    def _may_all_grow(self) -> bool:
        """Whether the next token of every running request is free of the turns of groups and of paths' shares."""
        shares = any(self.config.paths[path].share < 1 for path in PATHS[1:])
        return not self.config.length_groups and not (shares and any(self._census.paths()))

    def _grant_token(self, request: Request) -> None:
        """What `_grant` of one token comes to, for a request whose prompt is computed: the usual case, fast."""
        total = request.num_computed + 1
        is_decoding = total > request.num_prefill_tokens and (not request.path or self._may_grow(request))
        if is_decoding and self.cache.extend(request.request_id, total):
            self._grants[request] = 1
            self._budget -= 1
        else:
            self._grant(request, 1)

    def grant_prompts(self, before: tuple[float, int] = LAST) -> None:
        """What paths' shares of the budget leave to running prompts that come before a waiting request, or to all."""
        while self._prompts and self._prompts[0].order < before and self._budget:
            request = self._prompts.popleft()
            if request.status is Status.RUNNING:
                budget = min(self._budget, self._path_budget[request.path])
                self._path_budget[request.path] -= self._grant(request, budget)

    def grant_rest(self) -> None:
        """What nobody else wanted, to prompts in order, beyond their paths' shares."""
        for request in sorted(self._unfinished, key=_order):
            left = request.num_tokens - request.num_computed
            if self._budget and request.status is Status.RUNNING and left > max(1, self._grants.get(request, 0)):
                self._grant(request, self._budget, spare=True)

    def _grant(self, request: Request, budget: int, spare: bool = False) -> int:
        """Gives up to `budget` tokens more of the step to a running request; returns how many.

        Pages that are missing are taken from requests that come later, or the request itself is preempted, or it holds
        what it has and waits; of `spare` budget only what free pages allow.
        """
        granted = self._grants.get(request, 0)
        num_new = self._num_new(request, granted + budget)
        if num_new <= granted:
            return 0
        total = request.num_computed + num_new
        if not self._may_grow(request):
            return 0
        while not self.cache.extend(request.request_id, total):
            victim = None if spare else self._who_gives(request)
            if victim is None:
                return 0
            self._preempt(victim)
            self._is_short = True
            if victim is request:
                return 0
        self._grants[request] = num_new
        self._budget -= num_new - granted
        return num_new - granted

    def _num_new(self, request: Request, budget: int) -> int:
        """Tokens of a running request for this step."""
        if request.num_tokens >= request.max_total_tokens:
            return 0  # the token in flight is its last
        left = request.num_tokens - request.num_computed
        if left > 1:
            budget = min(budget, policy.chunk_limit(self.config, self._limits, request.path))
        begin = request.num_computed
        if not self.config.enable_chunked_prefill:
            begin = max(begin, request.num_prefill_tokens - 1)  # snapshots must not cut it: one at its end
        boundary = self.cache.next_boundary(request.request_id, begin, request.num_prefill_tokens)
        return max(0, min(left, boundary - request.num_computed, budget, self.cache.spec.max_chunk_tokens))

    def admit(self, request: Request, hashes: UnitHashes) -> bool:
        """Gives a waiting request a slot, pages and its first row. False, and nothing changed, if it does not fit."""
        remaining = request.num_tokens - request.num_computed
        whole = not self.config.enable_chunked_prefill
        if not self.is_open or (whole and remaining > self._budget and self._grants) or self.path_is_full(request.path):
            return False
        totals = (r.max_total_tokens for r in (*self.running, request))  # without preemption they have to fit at once
        if not self.config.enable_preemption and not self.cache.spec.can_hold(list(totals)):
            return False
        if self.running and not self._is_below_threshold(request):
            return False
        budget = min(self._budget, self._path_budget[request.path])
        budget = min(budget, policy.chunk_limit(self.config, self._limits, request.path))
        first = min(remaining, budget, self.cache.spec.max_chunk_tokens)
        admission = self.cache.admit(
            request.request_id,
            request.token_ids,
            request.cache_salt,
            request.reads_prefix_cache,
            first,
            hashes,
            request.tenant,
            request.path,
        )
        if admission is None:
            return False
        self._end_streak()
        bisect.insort(self.running, request, key=_order)
        self._census.add(request)
        request.status, request.shard, request.slot = Status.RUNNING, self.index, admission.slot
        request.num_computed, request.first_of_stay = admission.num_cached, True
        request.num_prefill_tokens = len(request.token_ids)
        num_new = self._num_new(request, budget)
        if not self.cache.extend(request.request_id, request.num_computed + num_new):
            raise AssertionError(f"{request.request_id}: admitted without the pages of its first chunk")
        self._grants[request] = num_new
        self._budget -= num_new
        self._path_budget[request.path] -= num_new
        self._unfinished.append(request)
        return True

    def _is_below_threshold(self, request: Request) -> bool:
        """Whether it may start beside others: also with what it held when it was preempted, or it would be again."""
        threshold, usage = self.config.preemption_threshold, self.cache.usage
        return threshold == 1 or (usage < threshold and usage + request.held <= threshold)

    def take_plan(self) -> ShardPlan:
        """What was planned, for a step that is dispatched next."""
        if self._streak:
            rows = self._streak.next_rows
        else:
            rows = Rows.of([self._row(request) for request in self.running if request in self._grants])
        return ShardPlan(rows, *self.cache.take_moves())

    def _row(self, request: Request) -> RowPlan:
        start, num_new = request.num_computed, self._grants[request]
        samples = start + num_new == request.num_tokens
        return RowPlan(request, self.cache.request(request.request_id), start, num_new, samples, request.first_of_stay)

    # --- giving way ------------------------------------------------------------------------------

    def can_make_way(self, request: Request) -> bool:
        """Whether rows and pages may be what a waiting request lacks, and someone may run who gives way to it."""
        whole = not self.config.enable_chunked_prefill and request.num_tokens > self._budget
        if self._budget <= 0 or self._is_short or whole:
            return False
        return self._census.may_give_way(request)

    def make_way(self, request: Request) -> bool:
        """Preempts one running request so that a waiting one can start; False if none has to give way to it."""
        over = self._paths_over_share()
        chosen = self._reclaimed([r for r in self.running if policy.gives_way(self.config, r, request, r.path in over)])
        if chosen is not None:
            self._preempt(chosen)
        return chosen is not None

    def _reclaimed(self, candidates: Sequence[Request]) -> Request | None:
        """Which of those that have to give way does, and notes it; None if there are none."""
        if not candidates:
            return None
        chosen = self._victim(candidates)
        chosen.num_reclaims += 1
        return chosen

    def _paths_over_share(self) -> set[Path]:
        return self._census.over_share(self._limits.max_num_seqs)

    def _over_share(self, request: Request) -> Request | None:
        """A request of a colder path whose pages beyond the path's share this running one takes back."""
        over = self._paths_over_share() if request.path is not Path.COLD else set()
        give_way = [r for r in self.running if r.path in over and policy.gives_way(self.config, r, request, True)]
        return self._reclaimed(give_way)

    def _who_gives(self, request: Request) -> Request | None:
        """Who is preempted so that a running request can grow; None if it waits.

        Those that come later, of its own path or colder where it has its path's share. If there are none, colder ones
        that hold more than theirs; or itself, unless it is beyond its share: then others go on, and it will.
        """
        later = self.running[bisect.bisect_right(self.running, request.order, key=_order) :]
        is_over = request.path in self._paths_over_share() and request.num_reclaims < policy.MAX_RECLAIMS
        if is_over:
            later = [r for r in later if r.path >= request.path]
        if later:
            return self._victim(later)
        return self._over_share(request) or (None if is_over else request)

    def _may_grow(self, request: Request) -> bool:
        """Within its path's pages, or the first of its path: so each path goes on."""
        limited = [path for path in PATHS[1 : request.path + 1] if self._census.is_over_share(path)]
        return all(next(r for r in self.running if r.path >= path) is request for path in limited)

    def _victim(self, candidates: Sequence[Request]) -> Request:
        self._end_streak()
        pairs = ((r, r.num_computed - self.cache.request(r.request_id).num_kept) for r in candidates)
        chosen = policy.victim(self.config, pairs)
        assert chosen is not None
        return chosen

    def _preempt(self, request: Request) -> None:
        granted = self._grants.pop(request, 0)
        self._budget += granted
        self._victims.append(request)
        self.preempt(request)

    def took_from_before(self, request: Request) -> bool:
        """Whether one of its path that comes before it was preempted in this step, and so is the first to start."""
        return any(victim.path == request.path and victim.order < request.order for victim in self._victims)

    def take_victims(self) -> list[Request]:
        """Those preempted since the step began: they wait again."""
        victims, self._victims = self._victims, []
        return victims

    def preempt(self, request: Request) -> None:
        """Takes everything back; it will be recomputed, starting from what the prefix cache kept.

        Where the cache has tiers that may be its very end: what has to make room is then moved to the host.
        """
        self._end_streak()
        held = self.cache.request(request.request_id)
        num_bytes = self.cache.spec.record_bytes(request.num_computed)
        swaps = self.cache.has_tiers and self._costs.swaps(request.num_computed - held.num_kept, num_bytes)
        self.num_swaps += swaps
        usage = self.cache.usage
        self.release(request, snapshot=swaps)
        request.held = usage - self.cache.usage
        request.status, request.num_computed = Status.WAITING, 0
        request.num_preemptions += 1

    # --- after planning --------------------------------------------------------------------------

    def dispatched(self, rows: Rows) -> None:
        """Notes that the rows are on their way: their tokens count as computed."""
        if self._streak:
            self._streak.dispatched()
            return
        for request, end, samples in zip(rows.requests, rows.end.tolist(), rows.samples, strict=True):
            request.num_computed = end
            request.num_pending += samples
            request.first_of_stay = False
            self.cache.computed(request.request_id, request.token_ids, end)
        if rows and rows.all_sample and len(rows) == len(self.running):
            self._streak = Streak(rows, self.cache)

    def complete(self, rows: Rows, tokens: Sequence[int]) -> int:
        """Takes a token for each row, which counts if the row samples and its request is live; returns how many do."""
        if self._streak and rows.requests is self._streak.rows.requests:
            self._streak.complete(tokens)
            return len(rows)
        num = 0
        for request, token, samples in zip(rows.requests, tokens, rows.samples, strict=True):
            if samples and request.status is not Status.FINISHED:
                request.num_pending -= 1
                request.token_ids.append(token)
                num += 1
        return num

    def release(self, request: Request, *, snapshot: bool = False) -> None:
        """Takes slot and pages back; `snapshot` leaves the request's end in the prefix cache."""
        self._end_streak()
        self.running.remove(request)
        self._census.remove(request)
        self.cache.release(request.request_id, request.token_ids, request.num_computed, snapshot=snapshot)
        request.shard = request.slot = -1
