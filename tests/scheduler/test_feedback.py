"""The feedback controller: by hand, and in a closed loop with a device whose knee is sharp, noisy, or moves."""

import functools

import pytest

from dsjax.config import FeedbackConfig, SchedulerConfig
from dsjax.scheduler.feedback import Controller, percentile
from dsjax.serving_config import TenantConfig
from tests.scheduler.simulated_device import Device, Fixed, Run, run

TARGET_S, FLAT_S = 0.05, 0.02
DECODES = {"prompt": 64, "output": 100}  # rows are what limits it
PROMPTS = {"prompt": 400, "output": 20}  # tokens are
BOTH = {"prompt": 400, "output": 50}


def controller(ttft_ms: float = 0.0, itl_ms: float = 1000 * TARGET_S, **scheduler) -> Controller:
    config = FeedbackConfig(target_ttft_ms=ttft_ms, target_itl_ms=itl_ms)
    return Controller(config, SchedulerConfig(**{"max_num_seqs": 64, "max_num_batched_tokens": 256, **scheduler}))


def limits(c: Controller) -> tuple[int, int]:
    return c.limits.max_num_batched_tokens, c.limits.max_num_seqs


class Fed:
    """A controller and a clock; `window` feeds a second of equal steps, after two that it takes to settle."""

    def __init__(self, c: Controller):
        self.c, self.now_s = c, 0.0

    def steps(self, num: int, step_s: float, num_tokens: int, num_rows: int) -> None:
        for _ in range(num):
            self.now_s += step_s
            for _ in range(num_rows):
                self.c.next_token(step_s)
            self.c.step(self.now_s, step_s, num_tokens, num_rows)

    def window(self, step_s: float, num_tokens: int, num_rows: int) -> tuple[int, int]:
        self.steps(round(1.0 / step_s) + 2, step_s, num_tokens, num_rows)
        return limits(self.c)


def test_percentile_is_the_least_value_that_so_many_do_not_exceed():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7], 0.99) == 7


def test_without_targets_the_limits_are_the_configs():
    c = controller(itl_ms=0.0)
    assert not c.enabled
    Fed(c).steps(500, 10.0, 256, 64)
    c.first_token(100.0)
    assert (*limits(c), c.num_raised, c.num_lowered) == (256, 64, 0, 0)


# --- one decision at a time ------------------------------------------------------------------


def test_a_limit_that_was_reached_rises_by_a_step_and_no_other_does():
    f = Fed(controller())
    assert limits(f.c) == (64, 16)
    assert f.window(0.02, 16, 16) == (64, 24)
    assert f.window(0.02, 24, 24) == (64, 32)
    assert f.window(0.02, 20, 20) == (64, 32)  # 32 rows were free to use
    assert f.window(0.02, 64, 20) == (96, 32)
    assert f.c.num_raised == 3


def test_where_answers_have_one_token_nothing_is_between_tokens_and_limits_rise():
    f = Fed(controller())
    for _ in range(260):
        f.now_s += 0.02
        f.c.step(f.now_s, 0.02, 64, 8)
    assert limits(f.c) == (96, 16)


def test_a_clock_too_coarse_to_see_a_step_is_no_error():
    c = controller()
    for i in range(200):
        c.next_token(0.0)
        c.step(i / 100, 0.0, 16, 16)
    assert c.num_lowered == 0


def test_an_idle_time_is_not_part_of_a_window():
    f = Fed(controller())
    f.steps(50, 0.02, 16, 16)
    f.now_s += 1000.0
    f.steps(12, 0.02, 24, 24)
    assert limits(f.c) == (64, 24)


def test_both_reached_rows_rise_first_unless_first_tokens_are_late():
    f = Fed(controller(ttft_ms=400.0))
    assert f.window(0.02, 64, 16) == (64, 24)
    f.c.first_token(0.33)  # more than 80 % of the target
    assert f.window(0.02, 64, 24) == (96, 24)


def test_a_rise_that_is_bad_goes_back_at_once_and_is_approached_in_smaller_steps():
    f = Fed(controller())
    assert f.window(0.02, 16, 16) == (64, 24)
    f.steps(2, 0.06, 24, 24)
    f.steps(10, 0.06, 24, 24)  # above the goal of 40 ms: ten steps are enough
    assert limits(f.c) == (64, 16)
    assert [f.window(0.02, 16, 16), f.window(0.02, 20, 20), f.window(0.02, 22, 22)] == [(64, 20), (64, 22), (64, 23)]
    for _ in range(5):
        assert f.window(0.02, 23, 23) == (64, 23)  # next to the bad value: it rests ...
    f.steps(500, 0.02, 23, 23)
    assert limits(f.c) == (64, 24)  # ... for ten windows, then probes
    f.steps(12, 0.06, 24, 24)
    assert limits(f.c) == (64, 23)


def test_a_rise_that_lowers_the_rate_is_bad_within_the_target():
    f = Fed(controller())
    assert f.window(0.02, 16, 16) == (64, 24)
    assert f.window(0.035, 24, 24) == (64, 16)  # 686 rows a second where there were 800
    f = Fed(controller())
    assert f.window(0.02, 16, 16) == (64, 24)
    assert f.window(0.03, 24, 24) == (64, 32)  # 800 again


def test_a_good_value_that_turns_bad_is_given_up_after_two_windows_in_proportion():
    f = Fed(controller())
    f.steps(50, 0.02, 12, 12)
    f.steps(17, 0.06, 12, 12)
    assert limits(f.c) == (64, 16)
    f.steps(17, 0.06, 12, 12)
    assert limits(f.c) == (64, 8)  # 12 rows were too many: 2/3 of them


def test_headroom_may_be_used_for_four_windows():
    f = Fed(controller())
    for _ in range(4):
        f.steps(23, 0.045, 16, 16)
    assert limits(f.c) == (64, 16)
    f.steps(51, 0.02, 15, 15)
    for _ in range(4):
        f.steps(23, 0.045, 16, 16)
    assert limits(f.c) == (64, 16)
    f.steps(23, 0.045, 16, 16)
    assert limits(f.c) == (64, 14)


@pytest.mark.parametrize(
    ("slow", "fast", "expected"),
    [
        ((80, 16), (16, 16), "tokens"),  # (tokens, rows) of slow and of fast steps
        ((16, 16), (8, 8), "rows"),
        ((64, 16), (64, 8), "rows"),
        ((64, 8), (16, 16), "tokens"),
        ((16, 16), None, "rows"),
        ((64, 16), None, "tokens"),  # nothing tells: tokens first
    ],
)
def test_the_limit_that_slow_steps_point_at_is_lowered(slow, fast, expected):
    f = Fed(controller())
    for _ in range(20):
        f.steps(5, 0.1, *slow)
        if fast:
            f.steps(20, 0.02, *fast)
        if f.c.num_lowered:
            break
    tokens, rows = limits(f.c)
    assert (tokens < 64, rows < 16) == (expected == "tokens", expected == "rows")


def test_if_nothing_tells_rows_give_way_first_when_first_tokens_are_late_and_what_does_not_help_is_undone():
    f = Fed(controller(ttft_ms=1000.0))
    seen = []
    for _ in range(150):
        f.c.first_token(2.0)
        f.steps(1, 0.1, *limits(f.c))
        if not seen or seen[-1] != limits(f.c):
            seen.append(limits(f.c))
    assert seen == [(64, 16), (64, 8), (64, 16), (32, 16), (64, 16)]


def test_limits_fall_as_long_as_that_helps_and_never_to_0_nor_tokens_below_rows():
    f = Fed(controller())
    for _ in range(200):
        rows = limits(f.c)[1]
        f.steps(12, 0.1 * rows, rows, rows)  # a row alone takes twice the target
        assert limits(f.c)[0] >= limits(f.c)[1] >= 1
    assert limits(f.c)[1] == 1


def test_rows_never_fall_to_those_that_are_reserved():
    f = Fed(controller(tenants=(TenantConfig(name="vip", reserved_seqs=17),)))
    assert limits(f.c) == (64, 18)
    for _ in range(20):
        f.steps(12, 1.0, 18, 18)
    assert limits(f.c)[1] == 18


def test_nothing_is_judged_while_rows_beyond_a_lower_limit_end():
    f = Fed(controller())
    f.steps(100, 0.1, 40, 40)
    assert (*limits(f.c), f.c.num_lowered) == (64, 16, 0)
    f.steps(22, 0.1, 16, 16)
    assert limits(f.c) == (64, 8)


# --- in a closed loop ------------------------------------------------------------------------


def assert_settled(r: Run, rows: int | None = None, tokens: int | None = None) -> None:
    """Within 10 % of the knees all the time, probes included, with a move in eight seconds on average at most."""
    moves = sum(a[1:] != b[1:] for a, b in zip(r.limits, r.limits[1:], strict=False))
    assert moves <= (r.limits[-1].now_s - r.limits[0].now_s) / 8
    if rows is not None:
        assert {0.9 * rows <= s.max_num_seqs <= 1.1 * rows for s in r.limits} == {True}
    if tokens is not None:
        assert {0.9 * tokens <= s.max_num_batched_tokens <= 1.1 * tokens for s in r.limits} == {True}


@functools.cache
def best_rate(device: Device, tokens: tuple[int, ...], rows: tuple[int, ...], **load) -> float:
    """Most tokens a second with fixed limits that keep the target."""
    runs = [run(Fixed(t, r), lambda _: device, 40, **load) for t in tokens for r in rows]
    return max(r.tokens_per_s() for r in runs if r.itl_p99() <= TARGET_S)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.05, 1), (0.15, 2), (0.15, 3)])
def test_it_finds_the_knee_of_rows(noise, seed):
    device = Device(knee_rows=24, noise=noise)
    r = run(controller(), lambda _: device, 200, seed=seed, **DECODES).after(30)
    assert_settled(r, rows=24)
    assert r.itl_p99() <= TARGET_S
    assert r.tokens_per_s() >= 0.9 * best_rate(device, (256,), (16, 20, 22, 23, 24, 25, 26, 28, 32), **DECODES)


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.05, 1), (0.05, 2)])
def test_it_finds_the_knee_of_tokens(noise, seed):
    device = Device(knee_tokens=96, noise=noise)
    r = run(controller(), lambda _: device, 200, seed=seed, **PROMPTS).after(30)
    assert_settled(r, tokens=96)
    assert r.itl_p99() <= TARGET_S
    assert r.tokens_per_s() >= 0.9 * best_rate(device, (64, 80, 88, 96, 104, 112, 128), (64,), **PROMPTS)


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_both_knees(seed):
    device = Device(knee_rows=12, knee_tokens=96, noise=0.05)
    r = run(controller(), lambda _: device, 200, seed=seed, **BOTH).after(100)
    assert_settled(r, rows=12, tokens=96)
    assert r.itl_p99() <= TARGET_S
    assert r.tokens_per_s() >= 0.9 * best_rate(device, (80, 96, 112), (10, 11, 12, 13, 14), **BOTH)


def test_it_follows_a_knee_that_moves():
    r = run(
        controller(),
        lambda now_s: Device(knee_rows=24 if now_s < 150 else 12 if now_s < 400 else 40, noise=0.05),
        800,
        **DECODES,
    )
    for begin_s, end_s, knee in ((30, 150, 24), (180, 400, 12), (600, 800, 40)):  # rows drain; the next probe comes
        part = r.after(begin_s)
        part.limits = [s for s in part.limits if s.now_s < end_s]
        assert_settled(part, rows=knee)


def test_a_target_for_first_tokens_alone_finds_the_knee_too():
    device = Device(knee_tokens=96, noise=0.05)
    c = controller(ttft_ms=150.0, itl_ms=0.0)
    assert_settled(run(c, lambda _: device, 200, requests_per_s=5, **PROMPTS).after(30), tokens=96)


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_target_out_of_reach_does_not_take_the_rate(noise):
    device, c = Device(flat_s=0.1, noise=noise), controller()
    r = run(c, lambda _: device, 400, **DECODES).after(100)
    assert c.load > 1
    assert r.tokens_per_s() >= 0.8 * run(Fixed(64, 16), lambda _: device, 100, **DECODES).tokens_per_s()


def test_a_light_load_moves_nothing():
    c = controller()
    r = run(c, lambda _: Device(), 100, requests_per_s=2, prompt=8, output=50)
    assert (c.num_raised, c.num_lowered, {s[1:] for s in r.limits}) == (0, 0, {(64, 16)})
