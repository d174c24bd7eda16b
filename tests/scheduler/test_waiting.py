"""Whose turn it is: exact orders, and the bound of the deficit round robin."""

import random

import pytest

from dsjax.request import Path
from dsjax.scheduler.waiting import QUANTUM, WaitingQueue
from dsjax.serving_config import TenantConfig
from tests.fakes import request


def made(number, tenant="", tokens=100, key_s=None, path=Path.HOT):
    new = request(f"{tenant}{number}", [1], tenant=tenant)
    new.number, new.expected_tokens, new.path = number, tokens, path
    new.key_s = float(number) if key_s is None else key_s
    return new


def start(queue, blocked=frozenset(), tenants=(), skip=()):
    head = queue.head(lambda r: r in skip, set(blocked), lambda name: name in tenants)
    if head is not None:
        queue.start(head)
    return head


def names(queue, num, **options):
    return [head.request_id if (head := start(queue, **options)) else None for _ in range(num)]


def test_one_tenant_is_served_in_order():
    queue = WaitingQueue(())
    for number, key in enumerate((5.0, 1.0, 3.0, 1.0)):
        queue.add(made(number, key_s=key))
    assert [r.request_id for r in queue] == ["1", "3", "2", "0"]
    assert (len(queue), queue.num_waiting(""), queue.num_waiting("x")) == (4, 4, 0)
    assert names(queue, 5) == ["1", "3", "2", "0", None]
    assert len(queue) == 0


def test_a_blocked_path_lets_others_pass_and_a_preempted_one_keeps_its_place():
    queue = WaitingQueue(())
    cold, *hot = made(0, path=Path.COLD), made(1), made(2)
    for new in (*hot, cold):
        queue.add(new)
    assert names(queue, 2, blocked={Path.COLD}) == ["1", "2"]
    again = made(1)
    queue.add(again)
    assert [r.request_id for r in queue] == ["0", "1"]
    assert names(queue, 1, skip=[cold]) == ["1"]
    assert names(queue, 2) == ["0", None]


def test_remove_takes_out_that_very_request():
    queue = WaitingQueue(())
    one, other = made(0), made(1)
    queue.add(one)
    with pytest.raises(ValueError, match="1 does not wait"):
        queue.remove(other)
    queue.remove(one)
    with pytest.raises(ValueError, match="0 does not wait"):
        queue.remove(one)


def test_equal_tenants_take_turns_by_tokens_not_by_requests():
    queue = WaitingQueue(())
    for number in range(4):
        queue.add(made(number, "big", QUANTUM))
    for number in range(4, 20):
        queue.add(made(number, "small", QUANTUM // 4))
    order = names(queue, 10)
    # a round: one request of big, four of small
    assert order == ["big0", "small4", "small5", "small6", "small7", "big1", "small8", "small9", "small10", "small11"]


def test_weights_are_shares():
    queue = WaitingQueue((TenantConfig(name="gold", weight=3), TenantConfig(name="free", weight=1)))
    for number in range(60):
        queue.add(made(number, "gold", 256))
        queue.add(made(100 + number, "free", 256))
    order = names(queue, 48)
    assert sum(name.startswith("gold") for name in order) == 36


def test_a_tenant_that_was_idle_has_saved_nothing_and_one_that_is_blocked_little():
    queue = WaitingQueue(())
    for number in range(40):
        queue.add(made(number, "a", QUANTUM))
    queue.add(made(100, "b", QUANTUM))
    names(queue, 20, tenants=("b",))  # b's own limits keep it from starting
    queue.add(made(101, "b", QUANTUM))
    queue.add(made(102, "b", QUANTUM))
    order = names(queue, 6)
    assert sum(name.startswith("b") for name in order) == 3 and set(order[3:]) & {"a20", "a21", "a22"}


@pytest.mark.parametrize("seed", range(5))
def test_while_tenants_wait_their_shares_differ_by_a_round_and_a_request_at_most(seed):
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 2.0, 5.0]) for name in "abc"}
    queue = WaitingQueue([TenantConfig(name=name, weight=weight) for name, weight in weights.items()])
    largest = 3000
    for number in range(900):
        queue.add(made(number, rng.choice("abc"), rng.randint(1, largest)))
    started = dict.fromkeys("abc", 0)
    while all(queue.num_waiting(name) for name in "abc"):
        head = start(queue)
        started[head.tenant] += head.expected_tokens
        shares = [started[name] / weights[name] for name in "abc"]
        assert max(shares) - min(shares) <= 2 * QUANTUM + largest / min(weights.values())


def test_what_was_preempted_is_paid_already():
    queue = WaitingQueue(())
    again = made(0, "a", 100 * QUANTUM)
    again.num_preemptions = 1
    queue.add(again)
    queue.add(made(1, "b", 1))
    queue.add(made(2, "b", 1))
    assert names(queue, 3) == ["a0", "b1", "b2"]
