"""The benchmark of linear time: its sums, and the program on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_model, linear
from benchmarks.roofline import Roof
from benchmarks.step_profile import PARTS, Profile
from tests.fakes import fake_engine


def profile(**parts):
    """A step of these parts, in ms."""
    return Profile(
        case="1x1",
        num_tokens=1,
        step_ms=sum(parts.values()),
        step_ms_range=(0, 0),
        parts_ms=dict.fromkeys(PARTS, 0.0) | parts,
        num_ops=0,
        top_ops=[],
        flops=0,
        bytes_moved=0,
        roof_ms=0,
    )


def test_a_token_of_each_length_beside_the_shortests():
    lines = linear.prompt_table({1000: [1.0, 2.0, 3.0], 4000: [12.0]}).splitlines()
    assert lines[2:] == ["| 1000 | 2.00 (1.00–3.00) | 2.000 | 1.00 |", "| 4000 | 12.00 (12.00–12.00) | 3.000 | 1.50 |"]


def test_growth_is_from_the_shortest_to_the_longest():
    profiles = {8: profile(csa=1.0, indexer=3.0), 4: profile(csa=1.0, indexer=2.0), 16: profile(csa=1.0, indexer=4.0)}
    assert linear.growth(profiles) == "16 beside 4 tokens: csa 1.00, indexer 2.00, step 1.67"


def test_a_refused_prompt_ends_it():
    assert linear.prompt_s(fake_engine(), 10, 0) > 0
    with pytest.raises(RuntimeError, match="a prompt of 40 tokens failed: INVALID_ARGUMENT"):
        linear.prompt_s(fake_engine(max_model_len=16), 40, 0)


def test_the_program_measures_both_engines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_model, "MODEL", "tiny-mixed")
    monkeypatch.setattr(linear, "measure_roof", lambda dtype: Roof(bytes_per_s=1e9, flops_per_s=1e9))
    output = tmp_path / "linear.jsonl"
    flags = ["--prompts=20,40", "--contexts=16,48", "--rows=2", "--short_model_len=32", "--max_num_batched_tokens=8"]
    assert linear.main(["linear", *flags, "--runs=1", "--seconds=0", f"--output={output}"]) == 0
    results = [json.loads(line) for line in output.read_text().splitlines()]
    found = [(r["max_model_len"], r.get("prompt"), r.get("context")) for r in results]
    assert found == [(56, 20, None), (56, 40, None), (56, None, 16), (56, None, 48), (32, 20, None), (32, None, 16)]
    printed = capsys.readouterr().out
    assert "| 40 |" in printed and "2x1, 48" in printed and "48 beside 16 tokens: swa" in printed
