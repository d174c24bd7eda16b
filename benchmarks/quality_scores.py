"""Runs prompts through the engine's steps with caches of each format, and scores the logits.  See `cache_quality`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from configs.models import MODELS
from dsjax.cache.spec import CacheSpec
from dsjax.config import CacheConfig, LayerKind, ModelConfig, SchedulerConfig
from dsjax.load import model_dir
from dsjax.tokenizer import Tokenizer
from dsjax.verify import Golden, read_golden, recording_runner, verify_mode
from training.corpus import Document
from training.data import BOS_ID, EOS_ID
from training.evaluate import windows

WINDOW = 1024  # tokens that held-out text is scored in, as on the model's card
PASSAGE, CUE = 24, 8  # tokens of a needle, and of them those that ask for the rest
DEPTHS = (0.1, 0.5, 0.9)  # of a needle in its context
NANO = "dsjax-nano"


@dataclass
class Scored(Golden):
    """A prompt whose logits are handed on: `score(position, logits)`."""

    score: Callable[[int, np.ndarray], None] = lambda position, logits: None

    def compare(self, position: int, got: np.ndarray, draft: np.ndarray | None = None) -> None:
        self.score(position, got)


def _prompt(index: int, ids: Iterable[int], score: Callable[[int, np.ndarray], None]) -> Scored:
    nothing = np.zeros((0, 0), np.float32)
    return Scored(
        index=index,
        ids=np.asarray(ids, np.int32),
        logits=nothing,
        greedy_ids=np.zeros(1, np.int32),  # a request makes a token, which nobody reads
        greedy_logits=nothing,
        mtp_logits=None,
        score=score,
    )


def _run(path: Path, config: ModelConfig, kv_cache_dtype: str, prompts: list[Scored], title: str) -> None:
    """Prompts one after another, as many in a step as fit."""
    longest = max(len(prompt.ids) for prompt in prompts)
    runner, max_model_len = recording_runner(path, config, longest, kv_cache_dtype=kv_cache_dtype)
    # One shape of a step: compiling a second one takes longer than padding costs.
    runner.runner.buckets.mixed = runner.runner.buckets.mixed[-1:]
    results = verify_mode("paged", runner, config, max_model_len, list(prompts))
    for _ in tqdm(results, total=len(prompts), desc=f"{title} {kv_cache_dtype}"):
        pass


@dataclass
class Errors:
    """Sums over positions and their logits."""

    largest: float = 0.0
    squares: float = 0.0
    want_squares: float = 0.0
    logits: int = 0
    agreed: int = 0
    positions: int = 0

    def add(self, got: np.ndarray, want: np.ndarray) -> None:
        difference = got.astype(np.float64) - want
        self.largest = max(self.largest, float(np.max(np.abs(difference))))
        self.squares += float(np.sum(difference**2))
        self.want_squares += float(np.sum(want.astype(np.float64) ** 2))
        self.logits += want.size
        self.agreed += int(np.argmax(got) == np.argmax(want))
        self.positions += 1

    def summary(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "logit_rms": math.sqrt(self.want_squares / self.logits),
            "rms_error": math.sqrt(self.squares / self.logits),
            "max_error": self.largest,
            "agreement": self.agreed / self.positions,
        }


def logits(folders: list[Path], dtypes: list[str]) -> list[dict[str, Any]]:
    """Against the recorded logits of each golden set."""
    rows = []
    for dtype in dtypes:
        for folder in folders:
            errors = Errors()
            prompts = []
            for golden in read_golden(folder):
                ids = [*golden.ids, *golden.greedy_ids[:-1]]
                want = np.concatenate([golden.logits, golden.greedy_logits[1:]])
                prompts.append(_prompt(golden.index, ids, lambda p, got, w=want, e=errors: e.add(got, w[p])))
            _run(folder, ModelConfig.from_dir(folder), dtype, prompts, folder.name)
            rows.append({"kv_cache_dtype": dtype, "set": folder.name, **errors.summary()})
    return rows


def text(documents: list[Document], dtypes: list[str]) -> list[dict[str, Any]]:
    """Bits of all tokens and the end of each chapter, over all bytes."""
    path = model_dir(NANO)
    config, tokenizer = ModelConfig.from_dir(path), Tokenizer.from_path(path)
    pieces = [
        piece
        for document in documents
        for piece in windows(np.array([BOS_ID, *tokenizer.encode(document.text), EOS_ID], np.int32), WINDOW)
    ]
    num_bytes = sum(len(document.text.encode()) for document in documents)
    rows = []
    for dtype in dtypes:
        log_p: list[float] = []
        right: list[bool] = []

        def score(position: int, got: np.ndarray, tokens: np.ndarray, count: int, log_p=log_p, right=right) -> None:
            if position >= len(tokens) - 1 - count:
                log_p.append(_log_p(got, tokens[position + 1]))
                right.append(bool(np.argmax(got) == tokens[position + 1]))

        prompts = [
            _prompt(i, tokens[:-1], lambda p, got, t=tokens, n=count, score=score: score(p, got, t, n))
            for i, (tokens, count) in enumerate(pieces)
        ]
        _run(path, config, dtype, prompts, "text")
        rows.append(
            {
                "kv_cache_dtype": dtype,
                "bits_per_byte": -sum(log_p) / math.log(2) / num_bytes,
                "tokens": len(log_p),
                "bytes": num_bytes,
                "top1": float(np.mean(right)),
            }
        )
    return rows


def _log_p(logits: np.ndarray, token: int) -> float:
    logits = logits.astype(np.float64)
    top = logits.max()
    return float(logits[token] - top - np.log(np.sum(np.exp(logits - top))))


@dataclass(frozen=True)
class Needle:
    """A context in which a passage stands at a depth and is begun again at the end; the rest is to be recalled."""

    depth: float
    context: int
    ids: list[int]
    num_recalled: int


def make_needles(tokens: list[int], contexts: list[int], count: int, other: bool = False) -> list[Needle]:
    """Of the text `tokens`: haystack and passages. `other`: another passage stands in each one's place."""
    rng = np.random.default_rng(0)
    found = []
    for context in contexts:
        for depth in DEPTHS:
            for _ in range(count):
                size = context - 1 - 2 * PASSAGE
                at, passage, another = (int(x) for x in rng.integers(0, len(tokens) - size, 3))
                hay, needle = tokens[at : at + size], tokens[passage : passage + PASSAGE]
                place = round(depth * size)
                there = tokens[another : another + PASSAGE] if other else needle
                ids = [BOS_ID, *hay[:place], *there, *hay[place:], *needle]
                found.append(Needle(depth, context, ids, PASSAGE - CUE))
    return found


def needles(documents: list[Document], contexts: list[int], count: int, dtypes: list[str]) -> list[dict[str, Any]]:
    """Share of the recalled tokens that are the most likely ones, and with another passage in the needle's place."""
    path = model_dir(NANO)
    config, tokenizer = ModelConfig.from_dir(path), Tokenizer.from_path(path)
    tokens = [token for document in documents for token in tokenizer.encode(document.text)]
    sets = [make_needles(tokens, contexts, count, other) for other in (False, True)]
    rows, first = [], None
    for dtype in dtypes:
        chosen: dict[tuple[int, int], tuple[int, float]] = {}  # by prompt and position: top token, log P of the right
        prompts = []
        for i, needle in enumerate([*sets[0], *sets[1]]):
            begin = len(needle.ids) - 1 - needle.num_recalled

            def score(position: int, got: np.ndarray, i=i, ids=needle.ids, begin=begin, chosen=chosen) -> None:
                if position >= begin:
                    chosen[i, position] = int(np.argmax(got)), _log_p(got, ids[position + 1])

            prompts.append(_prompt(i, needle.ids[:-1], score))
        _run(path, config, dtype, prompts, "needles")
        first = first or chosen
        for context in contexts:
            for depth in DEPTHS:
                with_needle, without = (
                    [
                        (key, needle.ids[key[1] + 1])
                        for i, needle in enumerate(some, start)
                        if (needle.context, needle.depth) == (context, depth)
                        for key in ((i, len(needle.ids) - 2 - j) for j in range(needle.num_recalled))
                    ]
                    for start, some in zip((0, len(sets[0])), sets, strict=True)
                )
                rows.append(
                    {
                        "kv_cache_dtype": dtype,
                        "context": context,
                        "depth": depth,
                        "tokens": len(with_needle),
                        "recall": float(np.mean([chosen[key][0] == token for key, token in with_needle])),
                        "recall_without": float(np.mean([chosen[key][0] == token for key, token in without])),
                        "nats": float(-np.mean([chosen[key][1] for key, _ in with_needle])),
                        "same": float(np.mean([chosen[key][0] == first[key][0] for key, _ in with_needle])),
                    }
                )
    return rows


# Bytes that a format needs at least. A latent has 448 channels and 64 rotary ones; fp8 has 7 scales, padded to 8.
_LATENT = {"float32": 2048, "bfloat16": 1024, "int8": 448 + 4 + 128, "fp8": 448 + 8 + 128, "fp8_fp4": 448 + 8 + 128}
_KEY = {"float32": 512, "bfloat16": 256, "int8": 128 + 4, "fp8": 128 + 4, "fp8_fp4": 64 + 4}


def bytes_a_token(dtypes: list[str]) -> list[dict[str, Any]]:
    """Of Flash's compressed entries in full pages; the window does not grow with the context."""
    model = MODELS["deepseek-v4-flash"]()
    csa, hca = model.layer_kinds.count(LayerKind.CSA), model.layer_kinds.count(LayerKind.HCA)
    rows = []
    for dtype in dtypes:
        plain, tiled = (
            CacheSpec.of(
                model, CacheConfig(kv_cache_dtype=dtype), SchedulerConfig(), 32768, "bfloat16", tiled=tiled
            ).bytes_per_token()
            for tiled in (False, True)
        )
        theory = csa * (_LATENT[dtype] + _KEY[dtype]) / model.csa_ratio + hca * _LATENT[dtype] / model.hca_ratio
        rows.append({"kv_cache_dtype": dtype, "bytes": plain, "tiled_bytes": tiled, "theory": theory})
    return rows
