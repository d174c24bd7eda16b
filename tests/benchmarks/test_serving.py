"""The benchmark program from flags to stored result, with a target that answers at once."""

import json
import socket

import pytest

from benchmarks import serving, workloads
from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem


class Instant:
    """Answers request i with last + 1 after i + 1 seconds. Remembers the salts it was given."""

    vocab_size = 50
    model_id = "m"

    def __init__(self):
        self.config = {"model": "m", "scheduler.max_num_seqs": 4}
        self.salts = []

    def send(self, items, arrivals, salt, tick):
        self.salts.append(salt)
        records = []
        for n, item in enumerate(items):
            tick()
            tokens = [item.prompt[-1] + 1] * item.max_tokens
            times = [n + 1.0] * item.max_tokens
            records.append(
                Record(id=item.id, prompt_len=len(item.prompt), start_s=0.0, token_ids=tokens, token_times_s=times)
            )
        return records, float(len(items))

    def cpu_s(self):
        return 1.0

    def counters(self):
        num = 100 * len(self.salts)  # a send has 60 tokens in decode steps, of them 15 padded, and 40 in mixed ones
        return {
            "num_decode_bucket_tokens": 0.6 * num,
            "num_decode_padded_tokens": 0.15 * num,
            "num_mixed_bucket_tokens": 0.4 * num,
            "num_mixed_padded_tokens": 0.01 * num,
        }


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the program with flags; returns (exit code, results, target)."""

    def go(*args):
        target = Instant()
        monkeypatch.setattr(serving, "Offline", lambda: target)
        output = tmp_path / "out.json"
        serving.VALUES.unparse_flags()
        serving.parse(serving.VALUES, ["benchmarks.serving", f"--output={output}", *args], "")
        code = serving.run_all()
        return code, [json.loads(line) for line in output.read_text().splitlines()], target

    yield go
    for name in serving.VALUES:
        serving.VALUES[name].unparse()
    serving.VALUES.unparse_flags()


def test_results_of_a_workload_file(run, tmp_path):
    items = [WorkItem(id=4, prompt=(5, 6), max_tokens=2), WorkItem(id=9, prompt=(7,), max_tokens=1)]
    workloads.save(tmp_path / "w.json", items)
    (tmp_path / "ref.json").write_text(json.dumps({"4": [7, 7], "9": [3]}))
    code, results, target = run(
        f"--workload={tmp_path / 'w.json'}",
        f"--ref={tmp_path / 'ref.json'}",
        "--runs=2",
        "--label=x",
        "--num-warmups=1",
    )
    assert code == 0
    assert [r["run"] for r in results] == [0, 1]
    first = results[0]
    assert (first["completed"], first["total_input_tokens"], first["total_output_tokens"]) == (2, 3, 3)
    assert (first["mean_ttft_ms"], first["output_throughput"]) == (1500.0, 1.5)
    assert (first["match_first"], first["match_all"], first["match_of"]) == (1, 1, 2)
    assert (first["backend"], first["label"], first["model_id"]) == ("dsjax-offline", "x", "m")
    assert (first["request_rate"], first["max_concurrency"], first["num_prompts"]) == ("inf", None, 2)
    assert [r["decode_padded_share"] for r in results] == [0.25, 0.25]
    assert first["config"] == {"model": "m", "scheduler.max_num_seqs": 4}
    assert first["versions"]["numpy"]
    assert first["machine"]["cores"] >= 1
    assert len(set(target.salts)) == 3  # the warm-up and each run see no other's prefixes


def test_num_prompts_cuts_a_workload_file_and_salts_can_be_shared(run, tmp_path):
    workloads.save(tmp_path / "w.json", [WorkItem(id=i, prompt=(5,), max_tokens=1) for i in range(5)])
    _, results, target = run(
        f"--workload={tmp_path / 'w.json'}", "--num_prompts=2", "--runs=2", "--reuse_prefix_cache", "--num_warmups=0"
    )
    assert [r["completed"] for r in results] == [2, 2]
    assert len(set(target.salts)) == 1


def test_random_requests_use_the_models_vocabulary(run):
    _, results, _ = run("--num_prompts=3", "--random_input_len=10", "--random_output_len=2", "--num_warmups=0")
    assert (results[0]["total_input_tokens"], results[0]["total_output_tokens"]) == (30, 6)


def test_a_failed_request_is_exit_code_1(run, monkeypatch, capsys):
    def send(self, items, arrivals, salt, tick):
        return [Record(id=i.id, prompt_len=1, start_s=0.0, error="INTERNAL: dead") for i in items], 1.0

    monkeypatch.setattr(Instant, "send", send)
    code, results, _ = run("--num_prompts=2", "--num_warmups=0")
    assert (code, results[0]["failed"], results[0]["error_examples"]) == (1, 2, ["INTERNAL: dead"])
    assert capsys.readouterr().out == "none of 2 requests was answered\nerror: INTERNAL: dead\n"  # no table of zeros


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--workload=/nowhere.json", "/nowhere.json: it cannot be read as JSON: [Errno 2] No such file"),
        ("--ref=/nowhere.json", "/nowhere.json: it cannot be read as JSON: [Errno 2] No such file"),
        ("--output=/nowhere/x", "output='/nowhere/x' cannot be written: '/nowhere' is no folder"),
        ("--save_workload=/nowhere/x", "save_workload='/nowhere/x' cannot be written: '/nowhere' is no folder"),
        ("--num_prompts=-2", "num_prompts=-2 must be at least 1"),
        ("--num_prompts=0", "num_prompts=0 must be at least 1"),
        ("--random_input_len=0", "random_input_len=0 must be at least 1"),
        ("--random_output_len=-1", "random_output_len=-1 must be at least 1"),
        ("--random_prefix_len=-1", "random_prefix_len=-1 must be at least 0"),
        ("--random_range_ratio=1", "random_range_ratio=1.0 must be in [0, 1)"),
        ("--runs=0", "runs=0 must be at least 1"),
        ("--num_warmups=-1", "num_warmups=-1 must be at least 0"),
        ("--max_concurrency=-1", "max_concurrency=-1 must be at least 0"),
        ("--workload_seed=-1", "workload_seed=-1 must be at least 0"),
        ("--request_rate=0", "request_rate=0.0 must be more than 0, or inf"),
        ("--request_rate=nan", "request_rate=nan must be more than 0, or inf"),
        ("--temperature=nan", "temperature=nan is not allowed: it must be a finite number"),
    ],
)
def test_a_wrong_flag_is_said_before_a_model_is_loaded(flag, sentence, monkeypatch, capsys):
    monkeypatch.setattr(serving, "Offline", None)
    assert _main(flag, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"benchmarks.serving: error: {sentence}") and err.count("\n") == 1


def test_a_server_that_does_not_answer_is_named(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert _main("--backend=grpc", monkeypatch, f"--address={address}") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"benchmarks.serving: error: address='{address}' does not answer: UNAVAILABLE: ")
    assert err.count("\n") == 1


def _main(flag: str, monkeypatch, *more: str) -> int:
    """Runs the program and leaves its flags as they were."""
    monkeypatch.setattr("sys.argv", ["benchmarks.serving", flag, *more])
    serving.VALUES.unparse_flags()
    try:
        return serving.main()
    finally:
        for name in serving.VALUES:
            serving.VALUES[name].unparse()
        serving.VALUES.unparse_flags()
