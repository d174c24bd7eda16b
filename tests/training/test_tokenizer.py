"""The byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training.tokenizer import BOS, EOS, MARKERS, PAD, save, train

TEXTS = ["the cat sat on the mat, and the cat said that it was the cat's own mat", "a bat, a hat, a rat: 1234"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, vocab_size=300)


def test_ids_of_special_tokens_and_markers(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == 300
    assert [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.token_to_id(m) for m in MARKERS] == list(range(300 - len(MARKERS), 300))


@pytest.mark.parametrize("text", [TEXTS[0], "", " \n\n  x", "naïve – 漢字 🦊\x00", "0123456789"])
def test_any_text_survives(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_markers_are_kept_in_text_and_special_tokens_are_not(tokenizer: Tokenizer):
    ids = [tokenizer.token_to_id(t) for t in (BOS, "<think>", EOS)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>"
    assert tokenizer.encode("<｜User｜>").ids == [tokenizer.token_to_id("<｜User｜>")]


def test_training_is_deterministic_and_files_load(tokenizer: Tokenizer, tmp_path: Path):
    save(tokenizer, tmp_path, model_max_length=64)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == train(TEXTS, vocab_size=300).to_str()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 64
