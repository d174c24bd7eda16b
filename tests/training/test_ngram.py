"""Kneser-Ney probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.corpus import Document
from training.ngram import KneserNey, bits_per_byte, byte_sequences


def test_unigram_by_hand():
    # tokens after the begin token: 2, 2, 3, 1; discounts of 0.5, 0.75 where counts are too few to estimate them
    model = KneserNey([np.array([0, 2, 2, 3, 1])], order=1, vocab_size=4)
    kept, given = 1 / 4, (0.5 + 0.75 + 0.5) / 4
    expected = [(2 - 0.75) / 4 + given / 4] * 2 + [(1 - 0.5) * kept + given / 4] * 2
    np.testing.assert_allclose(model.probabilities(np.array([0, 2, 2, 3, 1])), expected, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_sums_to_one_in_any_context(order: int):
    rng = np.random.default_rng(0)
    vocab = 7
    sequences = [np.concatenate([[0], rng.integers(1, vocab, 200)]) for _ in range(5)]
    model = KneserNey(sequences, order=order, vocab_size=vocab)
    for _ in range(20):  # seen and unseen contexts
        context = rng.integers(0, vocab, order - 1)
        keys = model._keys(np.concatenate([context, [0]]), order) + np.arange(vocab)
        assert math.isclose(float(np.sum(model.of_keys(keys))), 1.0, rel_tol=1e-9)


def test_a_certain_text_costs_little_and_an_unseen_one_much():
    seen = np.array([0, *[2, 3, 4] * 200, 1])
    model = KneserNey([seen], order=3, vocab_size=16)
    assert np.min(model.probabilities(seen)[2:-1]) > 0.99
    assert np.max(model.probabilities(np.array([0, 9, 9, 9]))) < 0.1


def test_bits_count_the_end_over_the_bytes():
    document = Document(book="b", index=0, text="ab")
    (sequence,) = byte_sequences([document])
    assert sequence.tolist() == [0, 99, 100, 1]

    class Half:
        def probabilities(self, sequence: np.ndarray) -> np.ndarray:
            return np.full(len(sequence) - 1, 0.5)

    assert bits_per_byte(Half(), [sequence], [document]) == 1.5  # pyright: ignore[reportArgumentType]


def test_too_wide_keys_are_refused():
    with pytest.raises(ValueError, match="order=6"):
        KneserNey([np.array([0, 1])], order=6, vocab_size=2048)
