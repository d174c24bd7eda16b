"""Simulated engines against schedules and times worked by hand; the program from flags to its report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import offline, simulate
from benchmarks.baselines import contiguous_bytes, contiguous_rows, naive
from benchmarks.calibrate import Recorder, Sample, StepTable
from benchmarks.roofline import Roof
from benchmarks.simulated import Device, Roofline, make_engine
from benchmarks.workloads import Sessions, WorkItem
from dsjax.cache.spec import CacheSpec
from dsjax.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from dsjax.planner import Planner
from dsjax.runner.buckets import Bucket
from tests.cache.specs import cache_spec, model_config
from tests.fakes import assert_idle

CACHE = CacheConfig(block_size=8, prefix_unit_tokens=8, snapshot_interval_tokens=16, num_snapshots=32)


def timer(shards, bucket) -> float:
    """A second a step and a tenth a new token."""
    return 1.0 + 0.1 * sum(num_new for rows in shards for _, num_new in rows)


def engine_config(**scheduler) -> EngineConfig:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, **scheduler}
    return EngineConfig(model="m", cache=CACHE, scheduler=SchedulerConfig(**options))


def run(
    items, arrivals=None, *, static_batch=0, follow=lambda item, record: None, on_step=None, time=timer, **scheduler
):
    engine, clock = make_engine(engine_config(**scheduler), model_config(), time, dtype="float32", on_step=on_step)
    records, duration = offline.run(
        engine,
        items,
        arrivals=arrivals or [0.0] * len(items),
        static_batch=static_batch,
        params=simulate.greedy,
        follow=follow,
        clock=clock,
        sleep=clock.sleep,
    )
    assert_idle(engine)
    return records, duration, engine


def item(number: int, prompt: int, max_tokens: int) -> WorkItem:
    return WorkItem(id=number, prompt=tuple((number * 7 + i) % 64 for i in range(prompt)), max_tokens=max_tokens)


def test_times_of_a_hand_worked_schedule():
    """Step n is sent before n - 1 is read, and a token is known when its step has been read."""
    records, duration, _ = run([item(0, 20, 3)])
    # chunks of 8, 8 and 4, for a snapshot after each unit (1.8 s, 1.8 s, 1.4 s), then two steps of one token (1.1 s)
    assert records[0].token_times_s == pytest.approx([5.0, 6.1, 7.2])
    assert duration == records[0].token_times_s[-1]
    first = records[0].token_ids[0]
    assert first == (item(0, 20, 3).prompt[-1] + 1) % 64 and records[0].token_ids == [first, first + 1, first + 2]


def test_a_request_that_arrives_in_a_step_joins_the_one_after_next():
    steps = []
    records, _, _ = run(
        [item(0, 8, 4), item(1, 8, 1)],
        arrivals=[0.0, 2.0],
        on_step=lambda plan, bucket, seconds: steps.append([(r.request.request_id, r.num_new) for r in plan.rows]),
    )
    # At 0 the prompt (1.8 s) is sent and, before it is read, the second token's step (1.1 s). Reads end at 1.8 and 2.9;
    # the one that arrived at 2.0 is given at 2.9, when the step sent at 1.8 runs until 4.0.
    assert steps == [[("0#0", 8)], [("0#0", 1)], [("0#0", 1)], [("0#0", 1), ("1#0", 8)]]
    assert records[0].token_times_s == pytest.approx([1.8, 2.9, 4.0, 5.9])
    assert records[1].token_times_s == pytest.approx([5.9]) and records[1].start_s == 2.0


def test_a_static_batch_ends_with_its_longest_answer():
    records, _, _ = run([item(0, 4, 1), item(1, 4, 5), item(2, 4, 1)], static_batch=2)
    last = records[1].token_times_s[-1]
    assert last == pytest.approx(1.8 + 4 * 1.1)
    assert records[2].start_s == 0.0 and records[2].ttft_s == pytest.approx(last + 1.4)


def test_a_run_that_is_cut_off_cancels_what_is_live():
    engine, clock = make_engine(engine_config(), model_config(), timer, dtype="float32")
    items = [item(0, 8, 50), item(1, 8, 2)]
    records, duration = offline.run(
        engine,
        items,
        arrivals=[0.0, 100.0],
        until_s=5.0,
        params=simulate.greedy,
        clock=clock,
        sleep=clock.sleep,
    )
    assert_idle(engine)
    assert [r.id for r in records] == [0] and records[0].token_times_s == pytest.approx([1.8, 2.9, 4.0, 5.1])
    assert duration == pytest.approx(5.1)


def test_a_lone_request_waits_for_company_in_virtual_time():
    records, _, _ = run([item(0, 4, 1)], batch_wait_s=0.5)
    assert records[0].token_times_s == pytest.approx([0.5 + 1.4])
    records, _, _ = run([item(0, 4, 1), item(1, 4, 1)], arrivals=[0.0, 0.3], batch_wait_s=0.5, max_num_seqs=2)
    assert [r.token_times_s for r in records] == [pytest.approx([0.3 + 1.8])] * 2


def test_answers_do_not_depend_on_company_and_repeat():
    rng = np.random.default_rng(3)
    items = [item(i, int(rng.integers(1, 60)), int(rng.integers(1, 20))) for i in range(24)]
    arrivals = np.sort(rng.uniform(0, 20, 24)).tolist()
    together, _, _ = run(items, arrivals)
    again, _, _ = run(items, arrivals)
    assert [(r.token_ids, r.token_times_s) for r in together] == [(r.token_ids, r.token_times_s) for r in again]
    alone = {i.id: run([i])[0][0].token_ids for i in items}
    assert {r.id: r.token_ids for r in together} == alone


def test_conversations_find_their_prefix():
    sessions = Sessions(
        num_users=2, num_turns=3, first_len=20, turn_len=9, output_len=7, vocab_size=64, think_s=2.0, start_s=4.0
    )
    items, arrivals = sessions.begin()
    records, _, engine = run(items, arrivals, follow=sessions.follow)
    assert sorted(r.id for r in records) == list(range(6)) and all(r.ok for r in records)
    assert {r.id: r.prompt_len for r in records} == {0: 20, 1: 36, 2: 52, 3: 20, 4: 36, 5: 52}
    # The last token of an answer is never computed, and the state is kept at the token before it.
    assert {r.id: r.cached_tokens for r in records} == {0: 0, 1: 26, 2: 42, 3: 0, 4: 26, 5: 42}
    assert engine.stats().num_cached_tokens == 2 * (26 + 42)
    by_id = {r.id: r for r in records}
    assert by_id[1].start_s > by_id[0].token_times_s[-1]


# --- devices ---------------------------------------------------------------------------------------


def test_a_step_takes_its_roofline_time():
    spec = cache_spec()
    planner = Planner(model_config(), spec, dtype="float32", stored=False)
    cost = planner.step([[(20, 1), (5, 18)]], Bucket(64, 4, 16))
    roof = Roof(bytes_per_s=1e6, flops_per_s=1e12)
    time = Roofline(planner=planner, device=Device(roof=roof, efficiency=0.5, launch_s=0.25))
    assert time([[(20, 1), (5, 18)]], Bucket(64, 4, 16)) == pytest.approx(0.25 + cost.bytes_moved / 1e6 / 0.5)
    roof = Roof(bytes_per_s=1e12, flops_per_s=1e6)
    time = Roofline(planner=planner, device=Device(roof=roof, efficiency=0.5, launch_s=0.25))
    assert time([[(20, 1), (5, 18)]], Bucket(64, 4, 16)) == pytest.approx(0.25 + cost.flops / 1e6 / 0.5)


def test_devices_that_share_a_shard_send_activations():
    parallel = ParallelConfig.of("data:1,model:2", kv_parallel=2)
    model = model_config(index=32)
    planner = Planner(model, cache_spec(index=32, num_parts=2), dtype="float32", stored=False, parallel=parallel)
    roof = Roof(bytes_per_s=1e30, flops_per_s=1e30, link_bytes_per_s=1000.0)
    time = Roofline(planner=planner, device=Device(roof=roof, num_devices=2, launch_s=0.0, collective_s=3.0))
    # 4 layers, two all-reduces each; a ring of two sends half of 8 tokens x 32 channels x 2 bytes, twice
    assert time([[(0, 8)]], Bucket(8, 4, 8)) == pytest.approx(4 * 2 * (3.0 + 8 * 32 * 2 / 1000.0))


def test_the_mesh_of_so_many_devices():
    assert Device.of("a100").mesh() == ParallelConfig()
    both = {"kv_parallel": 4, "expert_parallel": True}
    assert Device.of("h100", 8).mesh() == ParallelConfig.of("data:2,model:4", **both)
    assert Device.of("v6e", 4).mesh() == ParallelConfig.of("data:1,model:4", **both)
    with pytest.raises(ConfigError, match="device='tpu' must be one of v5e"):
        Device.of("tpu")


def test_what_no_device_can_hold_is_not_simulated():
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_model_len=4096))
    with pytest.raises(ConfigError, match="raise tensor_parallel_size"):
        make_engine(config, simulate.model_of("deepseek-v4-flash"), Device.of("a100"))


def test_rows_of_a_contiguous_cache():
    config, model = engine_config(), model_config()
    # Bytes of 128 tokens: 8 latents of 64 bytes in 4 layers; CSA, 32 x 64 in 2; keys, 32 x 32 in 2; HCA, 16 x 64; STATE
    others = 32 * 64 * 2 + 32 * 32 * 2 + 16 * 64 + 1344
    assert contiguous_bytes(config, model, "float32") == 8 * 64 * 4 + others
    assert contiguous_bytes(config, model, "float32", rings=False) == 128 * 64 * 4 + others
    ours = CacheSpec.of(model, config.cache, config.scheduler, 128, "float32").num_bytes()
    assert contiguous_rows(config, model, "float32") == ours // (8 * 64 * 4 + others) == 22
    plain = naive(config, model, 100, "float32")
    assert plain.scheduler.max_num_seqs == 4  # not more than ours
    assert plain.scheduler.max_num_batched_tokens == 100 and not plain.scheduler.enable_chunked_prefill
    assert not plain.cache.enable_prefix_caching


# --- calibration -----------------------------------------------------------------------------------


def test_a_table_gives_back_what_was_measured():
    decode, mixed = Bucket(4, 4, 1), Bucket(16, 4, 16)
    line = [Sample(decode, 1 + i % 4, 1 + i % 4, 0.001 * (2 + i % 4)) for i in range(40)]
    table = StepTable([*line, Sample(mixed, 1, 9, 0.2), Sample(mixed, 2, 15, 0.4)])
    assert table([[(9, 1)] * 3], decode) == pytest.approx(0.004)
    assert table([[(0, 16)]], mixed) == pytest.approx(0.3)
    assert table([[(9, 1)] * 2], Bucket(2, 2, 1)) == pytest.approx(0.003)  # never seen: the next larger
    assert table([[(0, 64)]], Bucket(64, 4, 16)) == pytest.approx(0.3)  # none larger


def test_a_recorder_times_steps_from_the_end_of_the_one_before():
    engine, clock = make_engine(engine_config(), model_config(), timer, dtype="float32")
    engine.runner = recorder = Recorder(engine.runner, clock)
    offline.run(engine, [item(0, 12, 3)], arrivals=[0.0], params=simulate.greedy, clock=clock, sleep=clock.sleep)
    assert recorder.spec is engine.caches[0].spec
    assert [(s.bucket.num_tokens, s.num_rows, s.num_tokens) for s in recorder.samples] == [
        (16, 1, 8),
        (16, 1, 4),
        (1, 1, 1),
        (1, 1, 1),
    ]
    assert [s.seconds for s in recorder.samples] == pytest.approx([1.8, 1.4, 1.1, 1.1])


# --- the program -----------------------------------------------------------------------------------


def test_the_program_prints_the_lines_of_serving(tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    flags = (
        "--device=a100 --num_devices=4 --max_model_len=4096 --max_num_seqs=8 --cache_memory_bytes=4294967296 "
        "--num_prompts=6 --input_len=300 --output_len=5"
    ).split()
    assert simulate.main(["simulate", *flags, f"--output={output}"]) == 0
    text = capsys.readouterr().out
    assert (
        "4 x a100, deepseek-v4-flash, ours" in text and "Successful requests:                               6" in text
    )
    result = json.loads(output.read_text())
    assert result["completed"] == 6 and result["config"]["parallel.kv_parallel"] == 4
    assert simulate.main(["simulate", *flags, "--policy=naive"]) == 0
    assert simulate.main(["simulate", *flags, "--policy=static", "--users=2", "--turns=2"]) == 0
    assert simulate.main(["simulate", *flags, "--check"]) == 2
    assert "check=true needs device=cpu" in capsys.readouterr().err
