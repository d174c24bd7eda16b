"""dsjax-verify: exit codes, a line a prompt and mode, and errors that name what is wrong."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from servers import verify
from tests.golden_sets import COPIES

SET = COPIES / "g7_mtp"


def _run(*argv: str) -> int:
    return verify.main(["dsjax-verify", "--compilation_cache_dir=", *argv])


def test_a_good_set_passes_with_a_line_a_prompt_and_mode(capsys):
    assert _run(str(SET), "--mode=full", "--mode", "chunk=16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "dsjax-verify: all passed at atol=0.0002"
    assert [line.split()[1] for line in lines[:-1]] == ["full"] * 3 + ["chunk=16"] * 3
    pattern = r"ok +\S+ +prompt \d +\d+ tokens  max \|logit difference\| \d\.\d\de-0\d  mtp \d\.\d\de-0\d  greedy equal"
    assert all(re.fullmatch(pattern, line) for line in lines[:-1]), lines


def test_a_changed_logit_or_token_fails(tmp_path, capsys):
    folder = tmp_path / "changed"
    shutil.copytree(SET, folder)
    arrays = dict(np.load(SET / "golden.npz"))
    arrays["p0_logits"] = arrays["p0_logits"].copy()
    arrays["p0_logits"][3, 5] += 1e-3
    arrays["p1_greedy_ids"] = arrays["p1_greedy_ids"].copy()
    arrays["p1_greedy_ids"][2] ^= 1
    (folder / "golden.npz").unlink()
    np.savez(folder / "golden.npz", **arrays)
    assert _run(str(folder), "--mode=full") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL full       prompt 0") and lines[0].endswith("greedy equal")
    assert 0.8e-3 <= float(re.findall(r"difference\| (\S+)", lines[0])[0]) <= 1.2e-3  # the change and what atol allows
    assert lines[1].startswith("FAIL full       prompt 1") and lines[1].endswith("greedy DIFFERS")
    assert lines[2].startswith("ok   full       prompt 2")
    assert lines[3] == "dsjax-verify: 2 failed at atol=0.0002"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one checkpoint folder is needed, not 0"),
        ([str(SET), str(SET)], "one checkpoint folder is needed, not 2"),
        (["/no/such/folder"], "'/no/such/folder' is not a folder"),
        ([str(SET), "--mode=chunk=0"], "mode='chunk=0' must be full, paged, chunk=N or token"),
        ([str(SET), "--dtype=int8"], "dtype='int8' must be one of float32, bfloat16"),
        ([str(SET), "--weight_format=fp4"], "weight_format='fp4' must be one of auto, stored, widened"),
        ([str(SET), "--kv_cache_dtype=int3", "--mode=paged"], "kv_cache_dtype='int3' must be one of"),
        ([str(SET), "--what"], "what"),
        ([str(SET), "--atol=-1"], "atol=-1.0 must be 0 or more, and finite"),
        ([str(SET), "--atol=nan"], "atol=nan must be 0 or more, and finite"),
        ([str(SET), "--atol=inf"], "atol=inf must be 0 or more, and finite"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(argv, message, capsys):
    assert _run(*argv) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1


def test_a_folder_without_golden_outputs(tmp_path, capsys):
    shutil.copy(SET / "config.json", tmp_path)
    assert _run(str(tmp_path)) == 2
    assert "has no golden.npz to verify against" in capsys.readouterr().err
    np.savez(tmp_path / "golden.npz", p0_ids=np.zeros(3, np.int32))
    assert _run(str(tmp_path)) == 2
    assert "lacks p0_logits" in capsys.readouterr().err
