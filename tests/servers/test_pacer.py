"""Whose turn it is, on a clock that jumps."""

from servers.pacer import Pacer


def _pacer(max_per_s: float, waiting: str = "") -> Pacer[str]:
    pacer: Pacer[str] = Pacer(max_per_s)
    assert list(pacer.turns(0.0)) == []
    for name in waiting:
        pacer.add(name)
    return pacer


def test_turns_come_in_order_and_at_the_rate():
    pacer = _pacer(8, "abcdefgh")
    assert list(pacer.turns(0.0)) == []
    assert list(pacer.turns(0.25)) == ["a", "b"]
    assert list(pacer.turns(0.25)) == []
    pacer.add("a")
    assert list(pacer.turns(0.75)) == ["c", "d", "e", "f"]
    assert list(pacer.turns(100.0)) == ["g", "h", "a"]
    assert not pacer


def test_parts_of_a_turn_add_up_while_somebody_waits():
    pacer = _pacer(1, "abc")
    assert [list(pacer.turns(t)) for t in (0.5, 0.75, 1.0, 1.5, 2.0, 2.75, 3.0)] == [
        [], [], ["a"], [], ["b"], [], ["c"]
    ]  # fmt: skip


def test_turns_that_nobody_wanted_are_lost():
    pacer = _pacer(4)
    assert list(pacer.turns(10.0)) == []
    for name in "abc":
        pacer.add(name)
    assert list(pacer.turns(10.25)) == ["a"]


def test_without_a_limit_everybody_goes():
    pacer = _pacer(0, "abc")
    assert list(pacer.turns(0.0)) == ["a", "b", "c"]


def test_all_lets_everybody_go():
    pacer = _pacer(1, "abc")
    assert list(pacer.all()) == ["a", "b", "c"] and not pacer
