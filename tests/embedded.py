"""The embedded model on a small grid of step shapes, loaded once for all tests that use it."""

from __future__ import annotations

import functools

from dsjax import LLM

# Four shapes instead of six: compiling them is most of these tests' time.
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 1024, "prefix_unit_tokens": 16}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@functools.cache
def nano() -> LLM:
    return LLM("dsjax-nano", progress=False, fail_on_recompile=True, compilation_cache_dir="", **SETTINGS)
