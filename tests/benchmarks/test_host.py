"""The host's benchmark on a few steps: it measures what it says, and its program prints all of it."""

from __future__ import annotations

import json

from benchmarks import host, host_memory
from benchmarks.host_engine import make_engine, time_parts
from dsjax.detokenizer import Detokenizer


def test_every_part_of_a_step_is_in_its_line():
    for scenario in ("decode", "prompts"):
        row = host.measure_step(scenario, 2, host.BLOCK)
        assert all(row[f"{part}_us"] >= 0 for part in (*host.PARTS, "hand_over")) and row["sum_us"] > 0
        assert host.line(row).split()[:2] == [scenario, "2"]


def test_decoding_requests_have_an_event_a_step_and_prompts_that_come_in_replace_those_that_end():
    _, steps = host.run_steps("decode", 3, host.BLOCK, by_part=True)
    assert [len(events) for events in steps] == [3] * host.BLOCK
    _, steps = host.run_steps("prompts", 3, 2 * host.BLOCK, by_part=True)
    assert {event.request_id for event in steps[-1]}.isdisjoint({event.request_id for event in steps[0]})
    assert sum(event.finished for events in steps for event in events) >= 3


def test_timing_ends_with_its_block():
    before = Detokenizer.add
    with time_parts(make_engine(1)):
        assert Detokenizer.add is not before
    assert Detokenizer.add is before


def test_memory_is_watched_over_many_requests(capsys):
    rows = host_memory.watch(20, every=10)
    assert len(rows) == 2 and rows[-1]["num_requests"] == 20
    assert all(row["rss_bytes"] > 0 for row in rows)
    assert capsys.readouterr().out.count("MiB") == 2


def test_the_program_prints_and_writes_everything(tmp_path, capsys):
    output = tmp_path / "host.jsonl"
    flags = ["--num_running=1", "--num_steps=20", "--num_waiting=3", "--num_requests=1", f"--output={output}"]
    assert host.main(["host", *flags]) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert records[0]["versions"]["numpy"] and [r["scenario"] for r in records[1:3]] == ["decode", "prompts"]
    for record in records[3:]:
        assert all(name in printed for name in record)
    assert {"shed_2_requests_ms", "waiting_adds_us_a_step", "lookup_32768_tokens_us"} <= {k for r in records for k in r}
