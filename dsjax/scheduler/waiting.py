"""Requests that wait: in order for each tenant and path, and whose turn it is among tenants.  [no jax]

Turns are a deficit round robin on tokens (Shreedhar & Varghese, 1995): in each round a tenant's credit grows by QUANTUM
times its weight, and it starts requests as long as the credit pays for them. So while tenants wait, the tokens started
for each, divided by its weight, differ by at most QUANTUM and the largest request of either.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from dsjax.request import Path, Request
from dsjax.serving_config import TenantConfig

QUANTUM = 1024  # tokens of credit a round; less is fairer over short times and costs more rounds


def _order(request: Request) -> tuple[float, int]:
    return request.order


class _Tenant:
    """The waiting requests of one tenant."""

    def __init__(self, weight: float):
        self.weight = weight
        self.credit = 0.0  # tokens it may still start in this round
        self.queues: tuple[list[Request], ...] = tuple([] for _ in Path)  # each in order

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def head(self, skip: Callable[[Request], bool], blocked: set[Path]) -> Request | None:
        """The first in order, leaving out blocked paths and what `skip` says."""
        firsts = (
            next((request for request in self.queues[path] if not skip(request)), None)
            for path in Path
            if path not in blocked
        )
        return min((request for request in firsts if request), key=_order, default=None)

    def rounds(self, request: Request) -> int:
        """Until it can pay for the request."""
        return math.ceil(max(0.0, _cost(request) - self.credit) / (QUANTUM * self.weight))

    def most_credit(self) -> float:
        """What pays for the next request of any path, and a round."""
        return max((_cost(queue[0]) for queue in self.queues if queue), default=0) + QUANTUM * self.weight


class WaitingQueue:
    """Sized and iterable, in the order requests would start if all tenants' turns were the same."""

    def __init__(self, tenants: Sequence[TenantConfig]):
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._tenants: dict[str, _Tenant] = {}  # those with waiting requests, in the order of their turns in a round
        self._num = 0
        self.num_tokens = 0  # expected, of all of them

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*(queue for tenant in self._tenants.values() for queue in tenant.queues), key=_order)

    def unordered(self) -> Iterator[Request]:
        """All of them, faster than in order."""
        return itertools.chain.from_iterable(queue for tenant in self._tenants.values() for queue in tenant.queues)

    def num_waiting(self, tenant: str) -> int:
        return len(self._tenants.get(tenant, ()))

    def add(self, request: Request) -> None:
        """Puts it where its order says, also before others: a preempted one keeps its place."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(self._weights.get(request.tenant, 1.0))
        bisect.insort(tenant.queues[request.path], request, key=_order)
        self._num += 1
        self.num_tokens += request.expected_tokens

    def remove(self, request: Request) -> None:
        """Takes it out; ValueError if it does not wait."""
        tenant = self._tenants.get(request.tenant)
        queue = tenant.queues[request.path] if tenant else []
        at = bisect.bisect_left(queue, request.order, key=_order)
        if tenant is None or at == len(queue) or queue[at] is not request:
            raise ValueError(f"{request.request_id} does not wait")
        del queue[at]
        self._num -= 1
        self.num_tokens -= request.expected_tokens
        if not tenant:
            del self._tenants[request.tenant]  # and its credit: none is saved up while nothing waits

    def head(
        self, skip: Callable[[Request], bool], blocked: set[Path], tenant_blocked: Callable[[str], bool]
    ) -> Request | None:
        """The request whose turn it is; None if all are left out. Changes nothing."""
        best, least = None, math.inf
        for name, tenant in self._tenants.items():
            head = None if tenant_blocked(name) else tenant.head(skip, blocked)
            if head is not None and (rounds := tenant.rounds(head)) < least:
                best, least = head, rounds
        return best

    def start(self, request: Request) -> None:
        """Takes out a request that starts: its tenant pays, and the rounds that it took have passed for all."""
        tenant = self._tenants[request.tenant]
        rounds = tenant.rounds(request)
        if rounds and len(self._tenants) > 1:
            for other in self._tenants.values():
                # A tenant whose own limits keep it from starting saves no more than one request's worth.
                other.credit = min(other.credit + rounds * QUANTUM * other.weight, other.most_credit())
        tenant.credit = max(0.0, tenant.credit - _cost(request))
        self.remove(request)


def _cost(request: Request) -> int:
    """Tokens a tenant pays for; what was preempted is paid already."""
    return 0 if request.num_preemptions else request.expected_tokens
