"""The scale benchmark on an engine without a device: what it measures, resumes, finds falling and prints."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_model, scale
from benchmarks.scale import Load, drops, make_engine, measure, read_done, to_do
from dsjax.errors import ConfigError
from tests.fakes import fake_engine

FLAGS = ["--num_requests=2,1", "--input_lens=8,16", "--input_len=4", "--requests_per_length=3", "--output_len=2"]


def runs(**rates):
    """Runs of points "p1", "p2", ... with these rates."""
    return {int(name[1:]): [{"total_token_throughput": rate} for rate in some] for name, some in rates.items()}


def test_a_run_counts_all_tokens_of_all_its_bursts():
    result = measure(fake_engine(max_num_seqs=4), Load(num_requests=3, input_len=5, output_len=2), 0.0)
    assert result["completed"] == 3
    assert result["total_token_throughput"] * result["duration"] == pytest.approx(3 * 7)
    assert result["output_throughput"] * result["duration"] == pytest.approx(3 * 2)
    assert result["padded_share"] == 0.0


def test_bursts_are_sent_until_the_time_is_over(monkeypatch):
    sent = []
    real = scale.offline.run

    def run(engine, items, *, cache_salt, **options):
        sent.append((cache_salt, [item.prompt for item in items]))
        return real(engine, items, cache_salt=cache_salt, **options)[0], 1.0

    monkeypatch.setattr(scale.offline, "run", run)
    result = measure(fake_engine(), Load(num_requests=1, input_len=5, output_len=1), 3.0)
    assert (result["completed"], result["duration"]) == (3, 3.0)
    assert len({salt for salt, _ in sent}) == len({prompts[0] for _, prompts in sent}) == 3


def test_a_request_that_fails_ends_it():
    with pytest.raises(RuntimeError, match="2 of 2 requests failed: INVALID_ARGUMENT"):
        measure(fake_engine(max_model_len=16), Load(num_requests=2, input_len=40, output_len=2), 0.0)


def test_rounds_go_over_all_points_and_leave_out_what_is_done():
    sweep = {point: Load(num_requests=point, input_len=1, output_len=1) for point in (1, 2, 4)}
    assert to_do(sweep, 2, {1: [], 2: [], 4: []}) == [1, 2, 4, 1, 2, 4]
    assert to_do(sweep, 2, {1: [{}], 2: [{}, {}], 4: []}) == [4, 1, 4]
    assert to_do(sweep, 1, {1: [{}], 2: [{}], 4: [{}]}) == []


def test_a_point_falls_if_its_best_run_is_below_the_worst_with_less_load():
    assert drops(runs(p1=[100, 110], p2=[95, 98], p4=[200, 210])) == []  # 98 of 100 is noise
    assert drops(runs(p1=[100, 110], p2=[150, 160], p4=[120, 130], p8=[120, 149])) == [(2, 4, pytest.approx(130 / 150))]
    assert drops(runs(p1=[50])) == []


def test_results_of_other_settings_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    assert read_done(path, {"dtype": "float32"}) == []
    path.write_text(json.dumps({"settings": {"dtype": "bfloat16"}}) + "\n")
    assert read_done(path, {"dtype": "bfloat16"}) == [{"settings": {"dtype": "bfloat16"}}]
    with pytest.raises(ConfigError, match="has runs with dtype='bfloat16', and not 'float32': name another file"):
        read_done(path, {"dtype": "float32"})


@pytest.fixture
def engines(monkeypatch):
    """The sweeps that an engine was made for."""
    made = []

    def make(sweep, **options):
        made.append(sweep)
        return fake_engine(max_num_seqs=4)

    monkeypatch.setattr(scale, "make_engine", make)
    return made


def test_the_program_writes_every_run_and_goes_on_where_it_ended(tmp_path, capsys, engines):
    output = tmp_path / "scale.jsonl"
    flags = ["scale", *FLAGS, "--seconds=0", f"--output={output}"]
    assert scale.main([*flags, "--runs=1", "--sweep=requests"]) == 0
    assert engines == [{n: Load(num_requests=n, input_len=4, output_len=2) for n in (1, 2)}]
    assert "| 2 |" in capsys.readouterr().out
    assert scale.main([*flags, "--runs=2"]) == 0
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["sweep"], r["point"]) for r in results] == [
        *[("requests", 1), ("requests", 2)] * 2,
        *[("lengths", 8), ("lengths", 16)] * 2,
    ]
    assert engines[2] == {n: Load(num_requests=3, input_len=n, output_len=2) for n in (8, 16)}
    assert scale.main([*flags, "--runs=2"]) == 0  # nothing is left to measure
    assert len(engines) == 3
    assert capsys.readouterr().out.count("| 16 |") == 2
    assert scale.main([*flags, "--dtype=bfloat16"]) == 2


def test_plots_are_the_same_for_the_same_numbers(tmp_path, engines):
    pytest.importorskip("matplotlib")
    flags = ["scale", *FLAGS, "--runs=1", "--seconds=0", f"--output={tmp_path / 'scale.jsonl'}"]
    for folder in ("a", "b"):
        assert scale.main([*flags, f"--plots={tmp_path / folder}"]) == 0
    for name in ("requests", "lengths"):
        one, two = ((tmp_path / folder / f"scale-{name}.svg").read_text() for folder in ("a", "b"))
        assert one == two and "<svg" in one


def test_an_engine_fits_its_sweep():
    sweep = {n: Load(num_requests=n, input_len=20, output_len=4) for n in (1, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale.Engine, "warm_up", lambda self, progress: None)
        patch.setattr(bench_model, "MODEL", "tiny-mixed")
        engine = make_engine(sweep, max_num_seqs=2, max_num_batched_tokens=16)
    assert (engine.config.scheduler.max_num_seqs, engine.max_model_len) == (2, 24)
