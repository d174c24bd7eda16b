"""Orders, paths, shares and victims: pure functions, exact answers."""

import itertools
import math

import pytest

from dsjax.config import SchedulerConfig
from dsjax.errors import ConfigError
from dsjax.request import Path
from dsjax.scheduler import policy
from dsjax.scheduler.policy import Limits
from dsjax.serving_config import PathConfig, TenantConfig
from tests.fakes import request


def made(priority=0, expected=100, path=Path.HOT, reclaims=0, number=0):
    new = request(f"r{number}", [1], priority=priority)
    new.expected_tokens, new.path, new.num_reclaims, new.number = expected, path, reclaims, number
    return new


@pytest.mark.parametrize(
    ("num_tokens", "path"),
    [(1, Path.HOT), (8191, Path.HOT), (8192, Path.WARM), (16383, Path.WARM), (16384, Path.COLD), (10**6, Path.COLD)],
)
def test_paths_by_length(num_tokens, path):
    assert policy.path_of(SchedulerConfig(), num_tokens) is path


@pytest.mark.parametrize(
    ("policy_name", "priority", "expected", "seconds"),
    [
        ("fcfs", 5, 10_000, 0),
        ("priority", 2, 10_000, 120),
        ("priority", -1, 10_000, -60),
        ("shortest", 0, 100, 1),
        ("shortest", 0, 3000, 30),
        ("shortest", 0, 100_000, 30),  # max_overtake_s: however long, who comes 30 s later stays behind
        ("shortest", 1, 100, 61),
    ],
)
def test_handicaps(policy_name, priority, expected, seconds):
    config = SchedulerConfig(scheduling_policy=policy_name)
    assert policy.handicap_s(config, made(priority, expected)) == seconds


@pytest.mark.parametrize(
    ("path", "share", "max_num_seqs", "limit", "rows"),
    [
        (Path.HOT, 1.0, 0, 16, 16),
        (Path.COLD, 0.8, 0, 16, 12),
        (Path.COLD, 0.01, 0, 16, 1),  # one at least
        (Path.COLD, 0.8, 3, 16, 3),
        (Path.COLD, 0.8, 30, 16, 16),
        (Path.WARM, 0.5, 0, 7, 3),  # of the rows that feedback leaves
    ],
)
def test_rows_of_a_path(path, share, max_num_seqs, limit, rows):
    config = SchedulerConfig(**{path.name.lower(): PathConfig(
        max_tokens=SchedulerConfig().paths[path].max_tokens, share=share, max_num_seqs=max_num_seqs)})  # fmt: skip
    assert policy.row_limit(config, path, limit) == rows


def test_chunks_and_budgets_of_paths():
    config = SchedulerConfig(cold=PathConfig(chunk_tokens=64, budget_share=0.25))
    limits = Limits.of(config)
    assert [policy.chunk_limit(config, limits, path) for path in Path] == [256, 256, 64]
    low = Limits(max_num_batched_tokens=128, max_num_seqs=4, chunk_tokens=32)
    assert [policy.chunk_limit(config, low, path) for path in Path] == [32, 32, 32]
    assert [policy.prompt_budget(config, path, 256) for path in Path] == [256, 192, 64]
    assert policy.prompt_budget(config, Path.COLD, 2) == 1  # never nothing
    whole = SchedulerConfig(enable_chunked_prefill=False, cold=PathConfig(chunk_tokens=64, budget_share=0.25))
    assert policy.chunk_limit(whole, low, Path.COLD) == policy.prompt_budget(whole, Path.COLD, 256) == 256


def test_the_victim_is_the_least_urgent_then_the_cheapest_then_the_last():
    config = SchedulerConfig(scheduling_policy="priority")
    a, b, c, d = (made(priority, number=i) for i, priority in enumerate((0, 3, 3, 1)))
    assert policy.victim(config, [(a, 0), (b, 50), (c, 40), (d, 1)]) is c
    assert policy.victim(config, [(a, 0), (b, 40), (c, 40), (d, 1)]) is c
    assert policy.victim(config, [(a, 9), (d, 100)]) is d
    fcfs = SchedulerConfig()  # knows no priorities
    assert policy.victim(fcfs, [(a, 9), (b, 100), (d, 10)]) is a
    assert policy.victim(config, []) is None


@pytest.mark.parametrize("over_share", [False, True])
def test_who_gives_way_to_a_request_that_waits(over_share):
    config = SchedulerConfig(scheduling_policy="priority")
    hot, cold = made(), made(path=Path.COLD)
    assert policy.gives_way(config, cold, hot, over_share) is over_share  # only what its path has beyond its share
    assert not policy.gives_way(config, hot, cold, over_share)
    assert policy.gives_way(config, made(2), made(1), over_share)
    assert not policy.gives_way(config, made(1), made(1), over_share)
    assert not policy.gives_way(config, made(2, reclaims=policy.MAX_RECLAIMS), made(1), over_share)
    assert not policy.gives_way(SchedulerConfig(), made(2), made(1), over_share)
    off = SchedulerConfig(scheduling_policy="priority", enable_preemption=False)
    assert not policy.gives_way(off, made(2), made(1), over_share)


def test_lengths_of_a_group_are_within_the_ratio():
    groups = [policy.length_group(3.0, n) for n in (1, 2, 3, 8, 9, 26, 27, 80, 81)]
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    for one, two in itertools.combinations(range(1, 2000), 2):
        if two > 3 * one:
            assert policy.length_group(3.0, one) != policy.length_group(3.0, two)
    assert [policy.group_in_turn([4, 1, 4, 2], turn) for turn in range(5)] == [1, 2, 4, 1, 2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' must be one of fcfs, priority, shortest"),
        ({"length_groups": 1.0}, "length_groups=1.0 must be more than 1"),
        ({"preemption_threshold": 0.0}, r"preemption_threshold=0.0 must be in \(0, 1\]"),
        ({"length_penalty": math.nan}, "length_penalty=nan must be at least 0"),
        ({"hot": PathConfig(max_tokens=8, share=0.5)}, "hot.share=0.5 and hot.max_num_seqs=0 must be 1 and 0"),
        ({"hot": PathConfig(max_tokens=8, max_num_seqs=2)}, "hot.share=1 and hot.max_num_seqs=2 must be 1 and 0"),
        ({"hot": PathConfig(max_tokens=20000)}, "hot.max_tokens=20000, warm.max_tokens=16384"),
        ({"tenants": (TenantConfig(name="a"), TenantConfig(name="a"))}, "names one twice: a, a"),
        ({"tenants": (TenantConfig(name="a", reserved_seqs=16),)}, "reserved_seqs of all tenants are 16"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 must be at least max_num_seqs=16"),
        ({"preemption_mode": "never"}, "preemption_mode='never' must be one of auto, recompute, swap"),
    ],
)
def test_wrong_configs_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(**fields)


def test_wrong_shares_and_weights_are_named():
    with pytest.raises(ConfigError, match="reserved_seqs=3 of tenant 'a' must be at most its max_num_seqs=2"):
        TenantConfig(name="a", max_num_seqs=2, reserved_seqs=3)
    with pytest.raises(ConfigError, match=r"share=1.5 must be in \(0, 1\]"):
        PathConfig(share=1.5)
    for weight in (0, 1e-310):  # fewer rounds than a float counts
        with pytest.raises(ConfigError, match=rf"weight={weight} of tenant 'a'"):
            TenantConfig(name="a", weight=weight)
