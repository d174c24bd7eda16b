"""Token rows for training: documents between begin and end tokens, joined into one stream and cut.

A tenth of the documents is added once more as a chat, so that the prompt format's markers are trained: its first
sentence is the user's turn and what follows is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from training import corpus

BOS_ID, EOS_ID = 0, 1
LOOKAHEAD = 2  # a row of T inputs has T + 2 tokens: targets of the head (t + 1) and of the MTP block (t + 2)
_CHAT_EVERY = 10
_MAX_ANSWER_CHARS = 1200


class Rows:
    """Rows of tokens in a fixed order that depends on `seed` alone; epoch after epoch, documents shuffled anew."""

    def __init__(self, tokenizer: Tokenizer, documents: list[corpus.Document], *, seed: int):
        self._plain = [np.array([BOS_ID, *e.ids, EOS_ID], np.int32) for e in _encode(tokenizer, documents)]
        chats = [_chat(tokenizer, piece) for d in documents[::_CHAT_EVERY] if (piece := _question_answer(d.text))]
        self._documents = self._plain + chats
        self._seed = seed
        self.num_tokens = sum(len(d) for d in self._documents)

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs in an epoch [vocab_size]."""
        return np.bincount(np.concatenate(self._documents), minlength=vocab_size)

    def batches(self, batch_tokens: int, length: int, start: int) -> Iterator[np.ndarray]:
        """Endless [batch_tokens // length, length + 2] int32 batches from input token `start` of all epochs on.

        A batch's rows come from anywhere in the epoch: neighbours in a book would make its gradient a chapter's.
        """
        epoch, offset = divmod(start, self.num_tokens)
        at, num_rows = offset // length, batch_tokens // length
        while True:
            rng = np.random.default_rng((self._seed, epoch))
            stream = np.concatenate([self._documents[i] for i in rng.permutation(len(self._documents))])
            begins = rng.permutation((len(stream) - LOOKAHEAD) // length) * length
            while at + num_rows <= len(begins):
                yield np.stack([stream[b : b + length + LOOKAHEAD] for b in begins[at : at + num_rows]])
                at += num_rows
            epoch, at = epoch + 1, 0


def _encode(tokenizer: Tokenizer, documents: list[corpus.Document]):
    return tokenizer.encode_batch([d.text for d in documents])


def _question_answer(text: str) -> tuple[str, str] | None:
    match = re.match(r"(.{40,300}?[.!?]['\"]?)\s(.+)", text, re.DOTALL)
    if match is None:
        return None
    answer = match[2][:_MAX_ANSWER_CHARS]
    end = max(answer.rfind(mark) for mark in (". ", '." ', ".\n", '."\n', "? ", "! "))
    return match[1], answer[: end + 1].rstrip() if end > 0 else answer


def _chat(tokenizer: Tokenizer, piece: tuple[str, str]) -> np.ndarray:
    """The release's chat mode: begin, user marker, question, assistant marker, end of (no) thought, answer, end."""
    user, assistant, no_thought = (tokenizer.token_to_id(m) for m in ("<｜User｜>", "<｜Assistant｜>", "</think>"))
    question, answer = (tokenizer.encode(part).ids for part in piece)
    return np.array([BOS_ID, user, *question, assistant, no_thought, *answer, EOS_ID], np.int32)


def hash_table(counts: np.ndarray, num_experts: int, k: int, *, seed: int) -> np.ndarray:
    """Experts of each token id on a hash layer [V, k]: distinct, and with equal loads under `counts`."""
    rng = np.random.default_rng(seed)
    load = rng.uniform(0, counts.max() / 2, num_experts)  # so that two layers with other seeds have other tables
    table = np.zeros((len(counts), k), np.int32)
    for token in np.argsort(-counts, kind="stable"):
        table[token] = np.argsort(load, kind="stable")[:k]
        load[table[token]] += max(counts[token], 1)
    return table
