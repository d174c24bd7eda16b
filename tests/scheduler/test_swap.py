"""When a preempted request's state is worth moving: by what steps and transfers have taken."""

from __future__ import annotations

import pytest

from dsjax.scheduler.swap import WEIGHT, SwapCosts


def test_modes_decide_alone():
    assert SwapCosts("swap").swaps(0, 1 << 40) and not SwapCosts("recompute").swaps(1 << 20, 1)


def test_auto_takes_the_cheaper():
    costs = SwapCosts("auto")
    assert costs.swaps(1, 1 << 40)  # nothing is known yet
    costs.step(0.5, 100, 10)
    assert costs.swaps(1, 1 << 40)
    costs.bytes_per_s = 1000.0
    assert costs.tokens_per_s == 200
    assert costs.swaps(21, 50) and not costs.swaps(20, 50)  # 0.1 s down and up


def test_only_steps_with_prompts_tell_what_computing_takes():
    costs = SwapCosts("auto")
    costs.step(1.0, 8, 8)
    assert costs.tokens_per_s == 0
    costs.step(1.0, 100, 8)
    costs.step(1.0, 200, 8)
    costs.step(0.0, 500, 8)
    assert costs.tokens_per_s == pytest.approx(100 + 100 * WEIGHT)
