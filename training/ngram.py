"""Baselines: n-gram models of BPE tokens with interpolated modified Kneser-Ney smoothing.

Run `python -m training.ngram --cache DIR`. An n-gram is one int64 key (`bits` bits a token), so counting
is sorting. Bits per byte count every token of a document and its end, over the document's bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from absl import app
from tokenizers import Tokenizer

from training import corpus, places
from training.data import BOS_ID, EOS_ID


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The counts of one order. `contexts` are keys of n-1 tokens, sorted, as are `grams`."""

    grams: np.ndarray  # [G] int64
    counts: np.ndarray  # [G] raw counts (highest order) or distinct left neighbours
    contexts: np.ndarray  # [C] int64
    totals: np.ndarray  # [C] sum of counts
    backoff: np.ndarray  # [C] mass given to the next lower order
    discounts: np.ndarray  # [4] taken from counts of 0, 1, 2 and at least 3


class KneserNey:
    """P(token | n-1 tokens before), smoothed down to the uniform distribution over `vocab_size`."""

    def __init__(self, sequences: list[np.ndarray], *, order: int, vocab_size: int):
        self.order = order
        self.vocab_size = vocab_size
        self._bits = max(vocab_size - 1, 1).bit_length()
        if self._bits * order > 62:
            raise ValueError(
                f"order={order} with vocab_size={vocab_size} needs {self._bits * order} bits of at most 62"
            )
        keys = np.concatenate([self._keys(_padded(s, order), order) for s in sequences])
        grams, counts = np.unique(keys, return_counts=True)
        self._orders: list[_Order] = []
        for n in range(order, 0, -1):
            self._orders.append(self._statistics(grams, counts))
            # An n-1 gram counts once for each distinct token to its left.
            grams, counts = np.unique(grams & ((1 << self._bits * (n - 1)) - 1), return_counts=True)
        self._orders.reverse()

    def probabilities(self, sequence: np.ndarray) -> np.ndarray:
        """P(token | before) of each token after the first (the begin token): float64 [len - 1]."""
        keys = self._keys(_padded(sequence, self.order), self.order)
        return self.of_keys(keys)

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        """P(last token | others) of n-grams of the highest order, as keys."""
        p = np.full(len(keys), 1.0 / self.vocab_size)
        for n, order in enumerate(self._orders, start=1):
            gram = keys & ((1 << self._bits * n) - 1)
            count = _lookup(order.grams, order.counts, gram)
            context = gram >> self._bits
            total = _lookup(order.contexts, order.totals, context)
            backoff = _lookup(order.contexts, order.backoff, context)
            kept = np.maximum(count - order.discounts[np.minimum(count, 3).astype(int)], 0.0)
            p = np.where(total > 0, (kept + backoff * p) / np.maximum(total, 1), p)
        return p

    def _keys(self, tokens: np.ndarray, n: int) -> np.ndarray:
        keys = np.zeros(len(tokens) - n + 1, np.int64)
        for offset in range(n):
            keys = (keys << self._bits) | tokens[offset : offset + len(keys)]
        return keys

    def _statistics(self, grams: np.ndarray, counts: np.ndarray) -> _Order:
        n1, n2, n3, n4 = (float(np.sum(counts == k)) for k in (1, 2, 3, 4))
        discounts = np.array([0.0, 0.5, 0.75, 0.9])  # for counts too few to estimate from, as in a test
        if min(n1, n2, n3, n4) > 0:  # Chen and Goodman (1998), equation 26
            y = n1 / (n1 + 2 * n2)
            discounts = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        contexts, index = np.unique(grams >> self._bits, return_inverse=True)
        totals = np.bincount(index, weights=counts, minlength=len(contexts))
        taken = np.minimum(counts, discounts[np.minimum(counts, 3)])
        backoff = np.bincount(index, weights=taken, minlength=len(contexts))
        return _Order(
            grams=grams, counts=counts, contexts=contexts, totals=totals, backoff=backoff, discounts=discounts
        )


def _padded(sequence: np.ndarray, order: int) -> np.ndarray:
    """The first token, which begins every sequence, repeated so that it is the whole context of the second."""
    return np.concatenate([np.full(max(order - 2, 0), sequence[0], np.int64), sequence.astype(np.int64)])[
        0 if order > 1 else 1 :
    ]


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def encode(tokenizer: Tokenizer, documents: list[corpus.Document]) -> list[np.ndarray]:
    """Begin, tokens, end of each document."""
    encoded = tokenizer.encode_batch([d.text for d in documents])
    return [np.array([BOS_ID, *e.ids, EOS_ID], np.int64) for e in encoded]


def byte_sequences(documents: list[corpus.Document]) -> list[np.ndarray]:
    """Begin (0), bytes (+2), end (1): the same text for n-grams of bytes."""
    return [
        np.concatenate([[BOS_ID], np.frombuffer(d.text.encode(), np.uint8).astype(np.int64) + 2, [EOS_ID]])
        for d in documents
    ]


def bits_per_byte(model: KneserNey, sequences: list[np.ndarray], documents: list[corpus.Document]) -> float:
    bits = -sum(float(np.sum(np.log2(model.probabilities(s)))) for s in sequences)
    return bits / sum(len(d.text.encode()) for d in documents)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    training, held_out = corpus.split(corpus.load(places.cache()))
    tokenizer = Tokenizer.from_file(str(places.tokenizer() / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    sequences, held = encode(tokenizer, training), encode(tokenizer, held_out)
    for order in (1, 2, 3, 4, 5):
        value = bits_per_byte(KneserNey(sequences, order=order, vocab_size=vocab_size), held, held_out)
        print(f"{order}-gram of tokens: {value:.4f} bits per byte", flush=True)
    sequences, held = byte_sequences(training), byte_sequences(held_out)
    for order in (2, 5):
        value = bits_per_byte(KneserNey(sequences, order=order, vocab_size=258), held, held_out)
        print(f"{order}-gram of bytes: {value:.4f} bits per byte", flush=True)
    print(f"uniform over bytes: {math.log2(256):.4f} bits per byte")


if __name__ == "__main__":
    app.run(main)
