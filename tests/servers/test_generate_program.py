"""dsjax-generate with a fake engine: files in, JSON lines out."""

import io
import json

import pytest

from dsjax.chat import ChatStrings
from servers import generate
from tests.servers.fakes import FakeEngine


def _no_strings(config):
    return ChatStrings()


def _run(tmp_path, name: str, text: str, *flags: str, engine: FakeEngine | None = None):
    """(exit code, answers)"""
    (tmp_path / name).write_text(text)
    out = tmp_path / "out.jsonl"
    argv = ["dsjax-generate", f"--input={tmp_path / name}", f"--output={out}", "--noprogress", *flags]
    code = generate.main(argv, make_engine=lambda config: engine or FakeEngine(), read_chat_strings=_no_strings)
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_text_lines_are_answered_in_order(tmp_path):
    lines = [chr(97 + i % 20) for i in range(100)]
    code, answers = _run(tmp_path, "p.txt", "\n".join(lines) + "\n\n", "--max-tokens=2",
                         engine=FakeEngine(max_num_seqs=3, max_num_waiting=5))  # fmt: skip
    assert code == 0
    assert [(a["prompt"], a["outputs"][0]["text"]) for a in answers] == [
        (c, chr(ord(c) + 1) + chr(ord(c) + 2)) for c in lines
    ]
    assert answers[0] == {
        "request_id": "1",
        "prompt": "a",
        "outputs": [{"index": 0, "text": "bc", "token_ids": [98, 99], "finish_reason": "length", "matched_stop": None}],
        "usage": {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2},
    }


def test_json_lines_have_their_own_parameters_and_errors(tmp_path):
    lines = [
        {"prompt": "abc", "request_id": "mine", "sampling_params": {"max_tokens": 1, "n": 2}},
        {"prompt_token_ids": [100], "sampling_params": {"logprobs": 1}},
        {"prompt_token_ids": []},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    code, answers = _run(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)), "--max_tokens=3")
    assert code == 1
    assert [o["text"] for o in answers[0]["outputs"]] == ["d", "d"] and answers[0]["request_id"] == "mine"
    assert answers[1]["outputs"][0]["logprobs"][0] == {
        "token_id": 101,
        "logprob": -0.5,
        "rank": 1,
        "top": [[101, -0.5]],
    }
    assert answers[2]["error"]["code"] == "INVALID_ARGUMENT"
    assert answers[3]["usage"]["prompt_tokens"] == 6  # BOS, User, "hi", Assistant, </think>


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", "{", "line 1 of input="),
        ("p.jsonl", '{"prompt": "a"}\n{"promt": "b"}', "field 'promt' is unknown"),
        ("p.jsonl", "{}", "exactly one of prompt, prompt_token_ids, messages"),
        ("p.jsonl", '{"prompt": "a", "sampling_params": {"temprature": 1}}', "temprature"),
        ("p.jsonl", '{"prompt": "a", "sampling_params": {"top_p": 2}}', "top_p=2.0 is not allowed"),
        ("p.jsonl", '{"prompt": "a", "request_id": "1"}\n{"prompt": "a", "request_id": "1"}', "stands twice"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path, name, text, words, capsys):
    assert _run(tmp_path, name, text) == (2, [])
    err = capsys.readouterr().err
    assert err.startswith("dsjax-generate: error: ") and err.count("\n") == 1 and words in err


def test_an_absent_file_is_named(tmp_path, capsys):
    assert generate.main(["dsjax-generate", "--input=/nowhere.txt"], make_engine=lambda config: FakeEngine()) == 2
    assert "input='/nowhere.txt' cannot be read" in capsys.readouterr().err
    assert generate.main(["dsjax-generate"], make_engine=lambda config: FakeEngine()) == 2
    assert "name a file of prompts with --input" in capsys.readouterr().err


def test_stdin_is_a_file_of_prompts(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\r\n\nx\n")))
    argv = ["dsjax-generate", "--input=-", "--noprogress", "--max_tokens=1"]
    assert generate.main(argv, make_engine=lambda config: FakeEngine(), read_chat_strings=_no_strings) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(a["prompt"], a["outputs"][0]["text"]) for a in answers] == [("ab", "c"), ("x", "y")]


def test_no_prompts_need_no_engine(tmp_path):
    (tmp_path / "p.txt").write_text("\n\n")
    argv = ["dsjax-generate", f"--input={tmp_path / 'p.txt'}", f"--output={tmp_path / 'out'}"]
    assert generate.main(argv, make_engine=None, read_chat_strings=None) == 0  # type: ignore[arg-type]
    assert (tmp_path / "out").read_text() == ""
