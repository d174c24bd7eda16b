"""Rows of training tokens, hash tables, and the windows of evaluation."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.corpus import Document
from training.data import BOS_ID, EOS_ID, Rows, hash_table
from training.evaluate import windows
from training.tokenizer import train

TEXT = "It was the best of times and it was the worst of times. It was the age of wisdom. We had everything before us."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([TEXT], vocab_size=290)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [Document(book="b", index=i, text=f"{i} {TEXT}") for i in range(12)]


def test_an_epoch_of_rows_is_the_shuffled_text_once(tokenizer: Tokenizer, documents: list[Document]):
    rows = Rows(tokenizer, documents, seed=3)
    per_epoch = (rows.num_tokens - 2) // 32 // 2  # batches of two rows
    epochs = list(islice(rows.batches(64, 32, 0), 2 * per_epoch))
    assert all(batch.shape == (2, 34) for batch in epochs)
    seen = np.sort(np.concatenate([batch[:, :32] for batch in epochs[:per_epoch]], axis=None))
    every = np.sort(np.concatenate(rows._documents))
    assert len(every) - 3 * 32 < len(seen) <= len(every) - 2  # less the last rows, which do not fill a batch
    assert not np.array_equal(epochs[0], epochs[per_epoch])  # the next epoch has another order


def test_rows_resume_anywhere(tokenizer: Tokenizer, documents: list[Document]):
    rows = Rows(tokenizer, documents, seed=3)
    whole = list(islice(rows.batches(64, 32, 0), 8))
    np.testing.assert_array_equal(next(rows.batches(64, 32, 5 * 64)), whole[5])
    assert next(rows.batches(64, 64, 5 * 64)).shape == (1, 66)


def test_documents_begin_and_end_and_a_tenth_is_also_a_chat(tokenizer: Tokenizer, documents: list[Document]):
    rows = Rows(tokenizer, documents, seed=3)
    counts = rows.counts(290)
    assert counts[BOS_ID] == counts[EOS_ID] == 12 + 2
    user, assistant = tokenizer.token_to_id("<｜User｜>"), tokenizer.token_to_id("<｜Assistant｜>")
    assert counts[user] == counts[assistant] == 2
    chat = rows._documents[12].tolist()
    question = tokenizer.decode(chat[2 : chat.index(assistant)])
    assert question == "0 It was the best of times and it was the worst of times."


def test_hash_table_is_even_and_its_experts_distinct():
    counts = (1000 / (1 + np.arange(64))).astype(int)
    table = hash_table(counts, 4, 2, seed=0)
    assert table.shape == (64, 2) and np.all(table[:, 0] != table[:, 1])
    loads = np.bincount(table.reshape(-1), weights=np.repeat(counts, 2), minlength=4)
    assert loads.max() / loads.mean() < 1.25
    assert not np.array_equal(table, hash_table(counts, 4, 2, seed=1))


@pytest.mark.parametrize("length", [2, 5, 8, 9, 13, 40])
def test_windows_score_every_token_but_the_first_once(length: int):
    tokens = np.arange(length)
    scored = []
    for piece, count in windows(tokens, 8):
        assert len(piece) <= 9
        assert count <= 4 or piece[0] == 0  # after the first, at least half a window of context
        scored += piece[len(piece) - count :].tolist()
    assert scored == list(range(1, length))
