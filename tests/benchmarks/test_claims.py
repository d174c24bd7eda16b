"""The claims' arithmetic on simulated engines of a tiny model, and the program's table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines import ONE_PATH
from benchmarks.claims import __main__ as program
from benchmarks.claims import feedback, latency, memory, throughput
from benchmarks.claims.bench import Row, measure
from benchmarks.metrics import Record
from benchmarks.simulated import make_engine
from benchmarks.workloads import Sessions
from dsjax.config import CacheConfig, EngineConfig, SchedulerConfig
from dsjax.serving_config import PathConfig
from tests.cache.specs import model_config

CACHE = CacheConfig(block_size=8, prefix_unit_tokens=8, snapshot_interval_tokens=16, num_snapshots=256)


def timer(shards, bucket) -> float:
    return 1.0 + 0.1 * sum(num_new for rows in shards for _, num_new in rows)


def config(cache: CacheConfig = CACHE, **changes: Any) -> EngineConfig:
    given = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 256,
        "hot": PathConfig(max_tokens=32),
        "warm": PathConfig(max_tokens=64),
        **changes,
    }
    return EngineConfig(model="m", cache=cache, scheduler=SchedulerConfig(**given))


def run(engine_config, items, **options):
    engine, clock = make_engine(engine_config, model_config(), timer, dtype="float32")
    return measure(engine, items, clock=clock, sleep=clock.sleep, **options)


class TinyBench:
    """As `Bench`, without a device."""

    model = "tiny"
    model_config = model_config()

    def config(self, *, cache: CacheConfig | None = None, **changes: Any) -> EngineConfig:
        return config(cache or CACHE, max_model_len=1024, **changes)

    run = staticmethod(run)


class LongBench(TinyBench):
    """Requests of all lengths on one path."""

    def config(self, *, cache: CacheConfig | None = None, **changes: Any) -> EngineConfig:
        sizes = {"max_model_len": 2304, "max_num_batched_tokens": 256, "max_num_seqs": 16}
        return config(cache or CACHE, **sizes, **ONE_PATH, **changes)


def test_a_mix_is_compared_with_its_classes_alone():
    row = throughput._mix("sim", ((2, 64, 8), (8, 8, 8)), 64, config(), run)
    again = throughput._mix("sim", ((2, 64, 8), (8, 8, 8)), 64, config(), run)
    assert row == again and row.met is (row.figures["ours"] >= 0.95)
    assert row.figures["static"] < row.figures["ours"]


def test_long_contexts_gain_from_what_the_cache_keeps():
    sessions = Sessions(num_users=3, num_turns=3, first_len=64, turn_len=4, output_len=4, vocab_size=64)
    old = config(CacheConfig(block_size=8, enable_prefix_caching=False), max_num_batched_tokens=96, max_num_seqs=2)
    row = throughput._long("sim", sessions, run, config(), old)
    assert row.figures["ours"]["total_cached_tokens"] > 0 == row.figures["naive"]["total_cached_tokens"]
    assert row.figures["gain"] == pytest.approx(
        row.figures["ours"]["request_throughput"] / row.figures["naive"]["request_throughput"]
    )


def test_paged_requests_take_what_they_have():
    def make(rows: int, cache: CacheConfig) -> EngineConfig:
        return config(cache, max_num_seqs=rows, max_num_batched_tokens=64)

    row = throughput._paged("sim", make, run, model_config(), "float32", (False, True))
    whole, rings = row.figures["results"]
    assert row.figures["paged"]["completed"] == whole["contiguous"]["completed"] == 256
    assert whole["rows"] < rings["rows"] <= 64 and whole["saved"] > rings["saved"]
    assert row.met is (whole["saved"] >= 0.4 and whole["gain"] >= 2.3)


def test_short_requests_go_first_within_the_bound():
    engine_config = config(max_overtake_s=30.0, length_penalty=1.0)
    row = latency._short_first("sim", ((3, 96, 2), (20, 4, 2)), 0.2, 64, engine_config, run)
    assert row.figures["spread_s"]["shortest"] < row.figures["spread_s"]["fcfs"]
    assert row.figures["longest_wait_s"]["shortest"] <= row.figures["bound_s"]


def test_the_knee_is_looked_for_by_fixed_limits_and_by_feedback(monkeypatch):
    """Steps take 1 s up to 8 tokens and a second for each further one."""
    monkeypatch.setattr(feedback, "BUDGETS", (4, 8, 12, 16))
    monkeypatch.setattr(feedback, "HORIZON_S", 600.0)
    monkeypatch.setattr(feedback, "TARGET_ITL_MS", 1600.0)
    monkeypatch.setattr(feedback, "LOADS", (0.5, 2.0))

    def knee(shards, bucket) -> float:
        return 1.0 + max(0, sum(num_new for rows in shards for _, num_new in rows) - 8)

    def on_knee(engine_config, items, **options):
        engine, clock = make_engine(engine_config, model_config(), knee, dtype="float32")
        return measure(engine, items, clock=clock, sleep=clock.sleep, **options)

    row = feedback._load("sim", config(max_num_waiting=1 << 20), 24, 64, most_rate=0.5, run=on_knee)
    assert row.figures["knee"] == 8
    assert row.figures["fixed"]["8"][1] == pytest.approx(1000.0) and row.figures["fixed"]["16"][1] > 1280
    assert row.figures["loads"]["0.5"][0] < row.figures["loads"]["2.0"][0]


def test_steady_counts_the_last_two_thirds(monkeypatch):
    monkeypatch.setattr(feedback, "HORIZON_S", 9.0)
    record = Record(id=0, prompt_len=1, start_s=0.0, token_times_s=[1.0, 2.0, 4.0, 8.0, 10.0])
    assert feedback.steady([record]) == (2 / 6, pytest.approx(np.percentile([2000.0, 4000.0], 99)))


def test_memory_rows_count_pages_and_hits():
    (row,) = memory.pressure(LongBench())  # type: ignore[arg-type]
    reserving = row.figures["reserving"]
    assert (reserving["num_preemptions"], reserving["computed_of_needed"]) == (0, 1.0)
    assert [r["completed"] for r in row.figures.values()] == [64, 64]
    (row,) = memory.prefix(TinyBench())  # type: ignore[arg-type]
    assert row.figures["hit_rate"] == row.figures["total_cached_tokens"] / row.figures["total_input_tokens"]
    assert row.figures["failed"] == 0


def test_the_program_prints_a_line_a_row(tmp_path, capsys, monkeypatch):
    def one(bench):
        yield Row(name="one", claim="c", where="w", measure="m", bar="b", measured="x", met=True, figures={"a": 1})
        yield Row(name="one", claim="d", where="w", measure="m", bar="b", measured="y", met=None)

    monkeypatch.setattr(program, "Bench", lambda model, folder: None)
    monkeypatch.setattr(program, "claims", lambda: {"one": one})
    output = tmp_path / "out.jsonl"
    assert program.main(["claims", f"--output={output}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| claim | measured on | measure | bar | measured | met |"
    assert lines[2:4] == ["| c | w | m | b | x | yes |", "| d | w | m | b | y | - |"]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["claim"] for r in records] == ["c", "d"] and records[0]["figures"] == {"a": 1}
    assert program.main(["claims", "--only=two"]) == 2
    assert "only='two' must be one of one" in capsys.readouterr().err


def test_every_claim_has_a_name():
    assert all(name == measure.__name__ for name, measure in program.claims().items())
