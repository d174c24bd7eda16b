"""Who is shed, against the same choice made the slow way: looking at everybody for each one that goes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dsjax.request import Request
from dsjax.scheduler.overload import Ahead, to_shed
from tests.scheduler.test_overload import req

WEIGHTS = {"a": 1.0, "b": 0.5, "c": 4.0}


def slowly(waiting: list[Request], new: Request, most_tokens: float, most: int) -> list[str]:
    def enough(left: list[Request]) -> bool:
        return len(left) < most and Ahead(new, WEIGHTS.__getitem__, left).tokens <= most_tokens

    def owed(left: list[Request]) -> Counter:
        found: Counter = Counter()
        for request in (*left, new):
            found[request.tenant] += request.expected_tokens / WEIGHTS[request.tenant]
        return found

    def is_less_urgent(request: Request) -> bool:
        if request.priority != new.priority or request.tenant == new.tenant:
            return request.priority > new.priority
        now = owed(left)
        return now[request.tenant] - request.expected_tokens / WEIGHTS[request.tenant] >= now[new.tenant]

    left, shed = list(waiting), []
    while not enough(left):
        able = [request for request in left if is_less_urgent(request)]
        if not able:
            return []
        now = owed(left)
        worst = max(able, key=lambda request: (request.priority, now[request.tenant], request.number))
        left.remove(worst)
        shed.append(worst)
    for request in shed[::-1]:
        if enough([*left, request]):
            left.append(request)
            shed.remove(request)
    return [request.request_id for request in shed]


@pytest.mark.parametrize("seed", range(100))
def test_the_same_go(seed: int):
    rng = random.Random(seed)
    waiting = [
        req(f"r{i}", 32 * rng.randint(1, 8), number=i, priority=rng.randrange(4), tenant=rng.choice("abc"), key_s=i)
        for i in range(rng.randint(1, 30))
    ]
    new = req("new", 64, number=99, priority=rng.randrange(3), tenant=rng.choice("abc"), key_s=rng.randint(0, 40))
    most_tokens, most = 32 * rng.randint(1, 120), rng.randint(1, len(waiting))
    chosen = to_shed(
        waiting,
        [new],
        WEIGHTS.__getitem__,
        lambda left: left.num < most and left.tokens <= most_tokens,
    )
    assert [request.request_id for request in chosen] == slowly(waiting, new, most_tokens, most)
