"""Where training keeps its files: the two flags that all its programs share."""

from __future__ import annotations

from pathlib import Path

from absl import flags

_CACHE = flags.DEFINE_string("cache", "training_cache", "folder for downloads, the tokenizer, states and logs")
_TOKENIZER = flags.DEFINE_string("tokenizer", "", "folder with tokenizer.json; the default is CACHE/tokenizer")


def cache() -> Path:
    return Path(_CACHE.value).resolve()


def tokenizer() -> Path:
    return Path(_TOKENIZER.value).resolve() if _TOKENIZER.value else cache() / "tokenizer"
