"""The circuit breaker, on a clock that the test sets."""

import math

import pytest

from dsjax.config import OverloadConfig
from dsjax.errors import ErrorCode, RequestError
from dsjax.scheduler.breaker import NUM_PROBES, Breaker, BreakerState, is_late

OK, FAILED = None, ErrorCode.INTERNAL


def breaker(**fields) -> Breaker:
    small = {"breaker_min_requests": 4, "breaker_window_s": 10.0, "breaker_open_s": 5.0, "step_stall_s": 60.0}
    return Breaker(OverloadConfig(**{**small, **fields}))


def end(breaker: Breaker, now_s: float, *codes: ErrorCode | None) -> None:
    for code in codes:
        breaker.ended(now_s, breaker.allow(now_s), code)


def refusal(breaker: Breaker, now_s: float, step_s: float = 0.0) -> RequestError:
    with pytest.raises(RequestError) as caught:
        breaker.allow(now_s, step_s)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    return caught.value


def opened(now_s: float = 0.0, **fields) -> Breaker:
    made = breaker(**fields)
    end(made, now_s, OK, FAILED, FAILED, FAILED)
    assert made.state is BreakerState.OPEN
    return made


def test_it_opens_above_the_error_rate_of_enough_requests():
    b = breaker()
    end(b, 0.0, FAILED, FAILED, FAILED)
    assert b.state is BreakerState.CLOSED  # three are too few to judge
    b = breaker()
    end(b, 0.0, OK, OK, FAILED, FAILED)
    assert b.state is BreakerState.CLOSED  # half is not more than 0.5
    end(b, 0.0, FAILED)
    assert (b.state, b.num_opened) == (BreakerState.OPEN, 1)
    error = refusal(b, 2.0)
    assert error.retry_after_s == 3.0
    assert error.message == (
        "new requests are refused for 3.0 s (breaker_open_s=5), because 3 of the latest 5 requests failed, "
        "more than breaker_error_rate=0.5 of them"
    )
    assert b.num_refused == 1


def test_only_failures_of_the_server_count_and_only_within_the_window():
    b = breaker()
    for code in ErrorCode:
        if code not in (ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED):
            end(b, 0.0, *[code] * 10)
    assert b.state is BreakerState.CLOSED
    end(b, 0.0, OK, FAILED, ErrorCode.DEADLINE_EXCEEDED)
    end(b, 10.0, FAILED)  # the three of ten seconds ago are forgotten
    end(b, 19.9, OK, FAILED)
    assert b.state is BreakerState.CLOSED
    end(b, 19.9, FAILED)
    assert b.state is BreakerState.OPEN


def test_one_tenant_that_fails_does_not_shut_out_others_that_do_not():
    b = breaker()

    def ends(code: ErrorCode | None, tenant: str, num: int, now_s: float = 0.0) -> BreakerState:
        for _ in range(num):
            b.ended(now_s, b.allow(now_s), code, tenant)
        return b.state

    assert ends(OK, "good", 2) is BreakerState.CLOSED
    assert ends(FAILED, "bad", 100) is BreakerState.CLOSED
    assert ends(FAILED, "other", 2) is BreakerState.CLOSED  # two of four without the worst: half is not more than 0.5
    assert ends(FAILED, "other", 1) is BreakerState.OPEN
    b = breaker()
    assert ends(OK, "good", 2) is BreakerState.CLOSED
    assert ends(FAILED, "bad", 3, 9.9) is BreakerState.CLOSED
    assert ends(FAILED, "bad", 1, 10.0) is BreakerState.OPEN  # nobody else was served within the window


def test_error_rate_of_1_is_off():
    b = breaker(breaker_error_rate=1.0)
    end(b, 0.0, *[FAILED] * 100)
    assert b.state is BreakerState.CLOSED


def test_probes_close_it():
    b = opened()
    refusal(b, 4.9)
    numbers = [b.allow(5.0) for _ in range(NUM_PROBES)]
    assert b.state is BreakerState.HALF_OPEN
    assert refusal(b, 6.0).retry_after_s == 4.0  # until the next lot
    for number in numbers:
        b.ended(6.0, number, OK)
    assert b.state is BreakerState.CLOSED
    end(b, 6.0, *[OK] * 50)


def test_a_probe_that_fails_opens_it_again():
    b = opened()
    first, second = b.allow(5.0), b.allow(5.0)
    b.ended(6.0, first, OK)
    b.ended(6.0, second, FAILED)
    assert (b.state, b.num_opened) == (BreakerState.OPEN, 2)
    assert refusal(b, 10.9).message.endswith("because a request that probed ended with INTERNAL")
    end(b, 11.0, *[OK] * NUM_PROBES)
    assert b.state is BreakerState.CLOSED


def test_probes_that_say_nothing_leave_their_places_to_others():
    b = opened()
    end(b, 5.0, *[ErrorCode.CANCELLED, ErrorCode.INVALID_ARGUMENT, OK] * 2)
    assert b.state is BreakerState.HALF_OPEN
    held = b.allow(5.0)
    refusal(b, 9.9)  # no more at a time than there are places
    b.ended(9.9, held, ErrorCode.CANCELLED)
    end(b, 9.9, OK)
    assert b.state is BreakerState.CLOSED


def test_probes_of_an_earlier_lot_leave_no_places():
    b = opened()
    old = [b.allow(5.0) for _ in range(NUM_PROBES)]
    b.allow(10.0)  # the next lot
    for number in old:
        b.ended(10.0, number, ErrorCode.CANCELLED)
    for _ in range(NUM_PROBES):
        b.allow(10.0)
    refusal(b, 10.0)


def test_a_deadline_is_the_engines_fault_if_most_of_it_went_by_before_a_token_that_an_idle_one_has_much_sooner():
    assert is_late(5.0, 5.0, 0.1)  # it waited all the time
    assert is_late(3.0, 5.0, 1.5)
    assert not is_late(2.9, 5.0, 1.5)  # an idle engine would have been late too
    assert not is_late(2.5, 5.0, 0.1)  # more than its half was left for the answer: that is too long
    assert not is_late(0.001, 0.001, 0.005)
    assert not is_late(5.0, 5.0, math.inf)  # nothing is known of the engine


def test_requests_let_in_before_it_opened_say_nothing_later():
    b = breaker()
    old = [b.allow(0.0) for _ in range(10)]
    end(b, 0.0, *[FAILED] * 4)
    probe = b.allow(5.0)
    for number in old:
        b.ended(5.0, number, FAILED)
    assert b.state is BreakerState.HALF_OPEN
    b.ended(5.0, probe, OK)
    end(b, 5.0, OK, OK)
    assert b.state is BreakerState.CLOSED


def test_a_stalled_step_opens_it_until_it_is_over():
    b = breaker()
    b.allow(0.0, step_s=60.0)
    error = refusal(b, 1.0, step_s=61.0)
    assert error.retry_after_s == 5.0
    assert error.message.endswith("because a step has run for 61.0 s, the limit step_stall_s=60")
    refusal(b, 20.0, step_s=80.0)  # it hangs still: no probes
    assert b.num_opened == 1
    refusal(b, 24.9)
    b.allow(25.0)
    assert b.state is BreakerState.HALF_OPEN
    refusal(b, 26.0, step_s=61.0)
    assert (b.state, b.num_opened) == (BreakerState.OPEN, 2)


def test_step_stall_of_0_is_off():
    b = breaker(step_stall_s=0.0)
    b.allow(0.0, step_s=1e9)
    assert b.state is BreakerState.CLOSED
