"""Rates, predicted waits, the choice of whom to shed, and the ladder of degraded modes, each alone."""

import logging

import pytest

from dsjax.config import OverloadConfig, SchedulerConfig
from dsjax.request import Request, SamplingParams, Status
from dsjax.scheduler.overload import Ahead, Degradation, Ladder, ServiceRate, to_shed
from dsjax.scheduler.policy import Limits


def req(
    name: str,
    tokens: int = 10,
    *,
    number: int = 0,
    priority: int = 0,
    tenant: str = "",
    sibling=None,
    key_s: float = 0.0,
) -> Request:
    made = Request(
        request_id=name,
        parent_id=name.partition("#")[0],
        prompt_token_ids=[1],
        params=SamplingParams(),
        priority=priority,
        tenant=tenant,
        sibling=sibling,
    )
    made.expected_tokens, made.number, made.key_s = tokens, number, key_s
    return made


def even(tenant: str) -> float:
    return 1.0


# --- rate and wait ---------------------------------------------------------------------------


def test_a_rate_is_known_after_a_second_and_weighs_the_latest_steps_more():
    rate = ServiceRate()
    rate.step(0.75, 150)
    assert rate.seconds(100) is None
    rate.step(0.75, 150)
    assert rate.seconds(100) == pytest.approx(0.5)
    for _ in range(400):
        rate.step(0.25, 100)  # twice as fast, for 100 s
    assert rate.seconds(100) == pytest.approx(0.25, rel=1e-3)


def test_tokens_ahead_of_one_tenant_are_those_before_it_in_order():
    waiting = [req("a", 100, number=0), req("b", 50, number=1), req("c", 70, number=3)]
    assert Ahead(req("new", 10, number=2), even, waiting).tokens == 150
    urgent = req("new", 10, number=4)
    urgent.key_s = -1.0
    assert Ahead(urgent, even, waiting).tokens == 0


def test_tokens_ahead_of_other_tenants_are_their_turns_until_then():
    flood = [req(f"f{i}", 100, number=i, tenant="flood") for i in range(50)]
    mine = [req("mine", 60, number=50, tenant="me")]
    new = req("new", 40, number=51, tenant="me")
    # When 60 + 40 of mine have had their turn, so have 100 of the other, or 400 at four times the weight.
    assert Ahead(new, even, [*flood, *mine]).tokens == 60 + 100
    assert Ahead(new, lambda name: 4.0 if name == "flood" else 1.0, [*flood, *mine]).tokens == 60 + 400
    assert Ahead(new, lambda name: 4.0 if name == "flood" else 1.0, [*flood[:3], *mine]).tokens == 60 + 300


# --- shedding ----------------------------------------------------------------------------------


def shed(waiting: list[Request], *new: Request, most: int, weight_of=even) -> list[str]:
    chosen = to_shed(waiting, new, weight_of, lambda left: left.num + len(new) <= most)
    return [request.request_id for request in chosen]


def test_the_highest_number_goes_first_and_of_those_the_newest():
    waiting = [req(f"{p}{i}", number=10 * i + p, priority=p) for i in range(3) for p in (0, 1, 2)]
    assert shed(waiting, req("new", priority=1), most=9) == ["22"]
    assert shed(waiting, req("new", priority=1), most=7) == ["22", "21", "20"]
    assert shed(waiting, req("new", priority=0), most=6) == ["22", "21", "20", "12"]


def test_nobody_goes_for_one_that_is_not_more_urgent_or_if_that_is_not_enough():
    waiting = [req("a", number=0), req("b", number=1, priority=1)]
    assert shed(waiting, req("new", priority=1), most=2) == []
    assert shed(waiting, req("new", priority=0), most=1) == []  # a would have to go as well


def test_of_a_priority_the_tenant_with_most_for_its_weight_goes_but_not_for_one_that_has_as_much():
    waiting = [req(f"x{i}", number=i, tenant="x") for i in range(4)] + [req("y0", number=9, tenant="y")]
    assert shed(waiting, req("new", tenant="z"), most=5) == ["x3"]
    assert shed(waiting, req("new", tenant="y"), most=5) == ["x3"]  # 40 and 20 become 30 and 20
    assert shed(waiting, req("new", tenant="x"), most=5) == []
    assert shed(waiting, req("new", 31, tenant="z"), most=5) == []  # 40 and 31 would become 30 and 31
    weight = {"x": 8.0, "y": 1.0, "z": 1.0}
    assert shed(waiting, req("new", 4, tenant="z"), most=5, weight_of=lambda name: weight[name]) == []


def test_those_whose_end_does_not_help_stay():
    new = req("new", number=99, key_s=5.0)
    ahead = [req(f"a{i}", number=i, priority=1) for i in range(3)]
    behind = [req(f"b{i}", number=10 + i, priority=2, key_s=9.0) for i in range(3)]
    chosen = to_shed([*ahead, *behind], [new], even, lambda left: left.tokens <= 10)
    assert [request.request_id for request in chosen] == ["a2", "a1"]


def test_that_nobody_can_go_shows_without_trying_one_after_another():
    asked = 0

    def enough(left):
        nonlocal asked
        asked += 1
        return False

    assert to_shed([req(f"b{i}", number=i, priority=2) for i in range(100)], [req("new")], even, enough) == []
    assert asked == 1


def test_all_sequences_of_a_request_go_and_none_of_one_that_has_begun():
    first = req("n#0", number=1, priority=1)
    siblings = [first, *[req(f"n#{i}", number=1 + i, priority=1, sibling=first) for i in (1, 2)]]
    waiting = [req("a#0", number=0, priority=1), *siblings]
    assert shed(waiting, req("new"), most=4) == ["n#0", "n#1", "n#2"]
    first.status = Status.RUNNING
    assert shed([waiting[0], *siblings[1:]], req("new"), most=3) == ["a#0"]
    waiting[0].num_preemptions = 1
    assert shed([waiting[0], *siblings[1:]], req("new"), most=3) == []


# --- degradation -------------------------------------------------------------------------------


def ladder(**fields) -> Ladder:
    config = {"enable_degradation": True, "degrade_after_s": 5.0, "degraded_max_tokens": 8}
    return Ladder(OverloadConfig(**{**config, **fields}), SchedulerConfig(max_num_batched_tokens=64))


def test_each_mode_is_entered_after_load_and_left_after_calm(caplog):
    rungs, levels = ladder(), []
    with caplog.at_level(logging.WARNING, "dsjax"):
        for second in range(30):
            rungs.update(float(second), 0.5)
            levels.append(int(rungs.level))
        assert levels == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 10
        for second in range(30, 60):
            rungs.update(float(second), 0.25)
            levels.append(int(rungs.level))
    assert levels[30:] == [4] * 5 + [3] * 5 + [2] * 5 + [1] * 5 + [0] * 10
    assert rungs.num_changes == len(caplog.records) == 8
    assert caplog.messages[0] == "degradation is SHORT_ANSWERS (level 1) after 5 s of load (load 0.50)"
    assert caplog.messages[-1] == "degradation is NONE (level 0) after 5 s of calm (load 0.25)"


def test_between_load_and_calm_the_mode_stays_and_times_begin_anew():
    rungs = ladder()
    for now_s, load in ((0, 0.9), (4.9, 0.9), (4.95, 0.4), (5, 0.9), (9.9, 0.9)):
        rungs.update(now_s, load)
    assert rungs.level is Degradation.NONE
    rungs.update(10.0, 0.9)
    assert rungs.level is Degradation.SHORT_ANSWERS
    for now_s in range(11, 100):
        rungs.update(now_s, 0.4)
    assert rungs.level is Degradation.SHORT_ANSWERS


def test_an_idle_time_is_calm():
    rungs = ladder()
    for second in range(16):
        rungs.update(float(second), 0.9)
    rungs.update(16.0, 0.0)
    rungs.update(30.0, 0.0)
    assert rungs.level is Degradation.SHORT_ANSWERS  # 10 of the 14 s took two modes back


def test_off_it_does_nothing():
    rungs = ladder(enable_degradation=False)
    for second in range(60):
        rungs.update(float(second), 1.0)
    assert (rungs.level, rungs.num_changes) == (Degradation.NONE, 0)


def test_what_each_mode_takes():
    rungs, limits = ladder(), Limits(max_num_batched_tokens=64, max_num_seqs=4)
    params = SamplingParams(logprobs=2, prompt_logprobs=1, min_tokens=10)
    taken = []
    for level in Degradation:
        rungs.level = level
        given = rungs.params(params)
        taken.append(
            (
                rungs.max_output(SamplingParams(), 100),
                rungs.max_output(params, 100),  # min_tokens holds
                rungs.limits(limits).chunk_tokens,
                given.logprobs,
                given.prompt_logprobs,
            )
        )
    assert taken == [
        (100, 100, 0, 2, 1),
        (8, 10, 0, 2, 1),
        (8, 10, 16, 2, 1),
        (8, 10, 16, None, None),
        (8, 10, 16, None, None),
    ]
    assert rungs.max_output(SamplingParams(), 3) == 3
