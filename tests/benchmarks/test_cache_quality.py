"""What benchmarks.cache_quality counts; known logits stand for the engine's steps, but for one slow test."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import cache_quality, quality_scores
from benchmarks.quality_scores import CUE, PASSAGE, Errors, make_needles
from dsjax.load import model_dir
from dsjax.tokenizer import Tokenizer
from dsjax.verify import read_golden
from tests.golden_sets import COPIES
from training.corpus import Document

VOCAB = 2048
DOCUMENTS = [Document(book="A", index=10, text="It was a dark and stormy night. " * 40)]


def steps(monkeypatch, logits) -> list[str]:
    """Puts `logits(ids, position)` in the place of the engine's; returns the formats asked for, as they are."""
    asked = []

    def run(path, config, kv_cache_dtype, prompts, title):
        asked.append(kv_cache_dtype)
        for prompt in prompts:
            for position in range(len(prompt.ids)):
                prompt.compare(position, logits(prompt.ids, position))

    monkeypatch.setattr(quality_scores, "_run", run)
    return asked


def test_errors_are_sums_over_positions():
    errors = Errors()
    errors.add(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    errors.add(np.array([3.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0]))
    assert errors.summary() == {
        "positions": 2,
        "logit_rms": math.sqrt(15 / 6),
        "rms_error": math.sqrt(11 / 6),
        "max_error": 3.0,
        "agreement": 0.5,
    }


def test_every_position_of_a_golden_prompt_and_its_continuation_is_compared(monkeypatch):
    folder = COPIES / "g4_mixed"
    golden = {
        (*g.ids, *g.greedy_ids[:-1]): np.concatenate([g.logits, g.greedy_logits[1:]]) for g in read_golden(folder)
    }
    asked = steps(monkeypatch, lambda ids, position: golden[tuple(ids)][position] + 0.25)
    rows = quality_scores.logits([folder], ["fp8", "int8"])
    assert asked == ["fp8", "int8"] and [row["set"] for row in rows] == ["g4_mixed"] * 2
    assert rows[0]["positions"] == sum(map(len, golden))
    assert rows[0]["max_error"] == pytest.approx(0.25, abs=1e-6) and rows[0]["agreement"] == 1.0


def test_logits_that_know_nothing_need_all_bits_of_every_token(monkeypatch):
    steps(monkeypatch, lambda ids, position: np.zeros(VOCAB, np.float32))
    (row,) = quality_scores.text(DOCUMENTS, ["float32"])
    num_tokens = len(Tokenizer.from_path(model_dir("dsjax-nano")).encode(DOCUMENTS[0].text)) + 1  # and the end
    assert row["tokens"] == num_tokens and row["bytes"] == 32 * 40
    assert row["bits_per_byte"] == pytest.approx(11 * num_tokens / (32 * 40))


def test_a_needle_stands_at_its_depth_and_is_begun_again_at_the_end():
    tokens = list(range(10_000, 20_000))
    first, other = make_needles(tokens, [256], 1), make_needles(tokens, [256], 1, other=True)
    assert [needle.depth for needle in first] == [0.1, 0.5, 0.9]
    for needle, without in zip(first, other, strict=True):
        passage, place = needle.ids[-PASSAGE:], 1 + round(needle.depth * (255 - 2 * PASSAGE))
        assert len(needle.ids) == 256 and needle.num_recalled == PASSAGE - CUE
        assert needle.ids[place : place + PASSAGE] == passage != without.ids[place : place + PASSAGE]
        assert needle.ids[:place] == without.ids[:place] and without.ids[-PASSAGE:] == passage


def test_a_model_that_copies_recalls_every_needle_and_none_without_it(monkeypatch):
    def copied(ids, position) -> np.ndarray:
        """What followed the token's last occurrence, 0 where there was none."""
        before, logits = np.flatnonzero(ids[:position] == ids[position]), np.zeros(20_000)
        logits[ids[before[-1] + 1] if len(before) else 0] = 1
        return logits

    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: list(range(2, 20_000)))
    steps(monkeypatch, copied)
    rows = quality_scores.needles(DOCUMENTS, [256], 2, ["float32", "fp8"])
    assert len(rows) == 2 * 3 and {row["tokens"] for row in rows} == {2 * (PASSAGE - CUE)}
    assert all(row["recall"] == row["same"] == 1.0 and row["recall_without"] == 0.0 for row in rows)


def test_bytes_a_token_of_flash_are_near_what_formats_need():
    rows = {row["kv_cache_dtype"]: row for row in quality_scores.bytes_a_token(list(cache_quality.DTYPES))}
    assert (rows["bfloat16"]["bytes"], rows["bfloat16"]["theory"]) == (6880, 6880)
    assert (round(rows["fp8"]["theory"]), round(rows["fp8_fp4"]["theory"])) == (3850, 3514)
    assert all(max(row["bytes"], row["tiled_bytes"]) <= 1.05 * row["theory"] for row in rows.values())


def test_results_are_a_table_and_lines_of_json(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    argv = ["x", "--measure=bytes", "--kv_cache_dtype=bfloat16", f"--output={file}"]
    assert cache_quality.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| bfloat16 | 6,880.0 | 6,880.0 | 6,880.00 | 1.000 |"
    machine, row = map(json.loads, file.read_text().splitlines())
    assert machine["commit"] and row == {
        "measure": "bytes",
        "kv_cache_dtype": "bfloat16",
        "bytes": 6880.0,
        "tiled_bytes": 6880.0,
        "theory": 6880.0,
    }


def test_the_tables():
    errors = {"positions": 9, "logit_rms": 4.0, "rms_error": 0.01, "max_error": 0.5, "agreement": 0.75}
    table = cache_quality.logits_table([{"kv_cache_dtype": "fp8", "set": "g", **errors}])
    assert table.splitlines()[2] == "| fp8 | g | 9 | 4.000 | 1.0e-02 | 5.0e-01 | 75.00 % |"
    texts = [{"kv_cache_dtype": d, "bits_per_byte": b, "tokens": 7, "top1": 0.5} for d, b in (("a", 1.5), ("b", 1.75))]
    assert cache_quality.text_table(texts).splitlines()[3] == "| b | 1.75000 | +0.25000 | 7 | 50.00 % |"
    needle = {"context": 64, "depth": 0.5, "recall": 0.5, "recall_without": 0.25, "nats": 3.0, "same": 1.0}
    table = cache_quality.needles_table([{"kv_cache_dtype": "fp8", **needle}])
    assert table.splitlines()[2] == "| fp8 | 64 | 0.50 | 50.0 % | 25.0 % | 3.000 | 100.0 % |"


@pytest.mark.parametrize("flag", ["measure", "kv_cache_dtype"])
def test_wrong_flags_are_one_sentence(flag, capsys):
    assert cache_quality.main(["x", f"--{flag}=no"]) == 2
    assert f"{flag}='no' must be one of " in capsys.readouterr().err


@pytest.mark.slow
def test_a_float32_cache_gives_the_recorded_logits_and_fp8_does_not():
    exact, fp8 = quality_scores.logits([COPIES / "g4_mixed"], ["float32", "fp8"])
    assert exact["max_error"] < 2e-4 and exact["agreement"] == 1.0
    assert 2e-4 < fp8["rms_error"] < fp8["logit_rms"]
