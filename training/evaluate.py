"""Measures a trained checkpoint: held-out bits per byte, what the MTP block's drafts are worth, and sample text.

    python -m training.evaluate --cache DIR --checkpoint dsjax/embedded/dsjax-nano

Uses the model's own whole-sequence forward (every expert slot exact), in float32 arithmetic on the stored weights.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from dsjax.checkpoint import load_params
from dsjax.config import ModelConfig
from dsjax.model.build import assemble
from dsjax.model.transformer import Transformer
from training import corpus, places
from training.data import BOS_ID, EOS_ID

_CHECKPOINT = flags.DEFINE_string("checkpoint", "dsjax/embedded/dsjax-nano", "folder of the checkpoint")
_WINDOW = flags.DEFINE_integer(
    "window", 512, "tokens the model sees at once, half of them at least before any scored one"
)
_SAMPLES = flags.DEFINE_integer("samples", 6, "sample texts (at most 6), each greedy and at temperature 0.7")
_SAMPLE_TOKENS = flags.DEFINE_integer("sample_tokens", 120, "tokens of a sample")
_DRAFT_DOCUMENTS = flags.DEFINE_integer("draft_documents", 32, "held-out documents to decode greedily from")
_MAX_DOCUMENTS = flags.DEFINE_integer("max_documents", 0, "held-out documents to score; 0 is all")

_BATCH = 8
_PROMPT, _GENERATED = 64, 64  # tokens, of the greedy decodes that drafts are counted on


def load_model(path: Path) -> Transformer:
    config = ModelConfig.from_dir(path)
    params = load_params(path, config, "float32")
    return nnx.merge(*assemble(config, params, jnp.dtype("float32"), with_mtp=True))


def windows(tokens: np.ndarray, size: int) -> list[tuple[np.ndarray, int]]:
    """(window of at most `size` + 1 tokens, how many of its last tokens it scores): all but the first, each once."""
    out, scored, begin = [], 1, 0
    while scored < len(tokens):
        end = min(begin + size + 1, len(tokens))
        out.append((tokens[begin:end], end - scored))
        scored, begin = end, begin + size // 2
    return out


@nnx.jit
def _scores(model: Transformer, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """ids [B, W + 1] -> log P of tokens 1.. [B, W], whether the MTP's guess of token t + 2 is the head's [B, W - 1]."""
    streams = jax.vmap(model.streams)(ids[:, :-1])
    logits = jax.vmap(model.logits)(streams)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)[..., 0]
    drafts = jnp.argmax(jax.vmap(model.mtp_logits)(streams, ids[:, :-1]), axis=-1)  # row j is a guess of token j + 2
    return log_p, drafts == jnp.argmax(logits[:, 1:], axis=-1)  # the head's own choice for it, given token j + 1


def held_out(model: Transformer, tokenizer: Tokenizer, documents: list[corpus.Document], size: int) -> dict[str, float]:
    """Bits per byte over documents (every token and the end, over all bytes), and agreement of the drafts."""
    pieces = []
    for document in documents:
        tokens = np.array([BOS_ID, *tokenizer.encode(document.text).ids, EOS_ID], np.int32)
        pieces += windows(tokens, size)
    log_p, agreed, drafts, tokens = 0.0, 0, 0, 0
    for at in tqdm(range(0, len(pieces), _BATCH), desc="held-out"):
        batch = pieces[at : at + _BATCH]
        ids = np.zeros((_BATCH, size + 1), np.int32)  # padding after a row's end does not reach back into it
        for row, (piece, _) in enumerate(batch):
            ids[row, : len(piece)] = piece
        scores, same = (np.asarray(x) for x in _scores(model, jnp.asarray(ids)))
        for row, (piece, count) in enumerate(batch):
            last = len(piece) - 1
            log_p += float(np.sum(scores[row, last - count : last], dtype=np.float64))
            part = same[row, max(last - count - 1, 0) : last - 1]
            agreed, drafts, tokens = agreed + int(part.sum()), drafts + part.size, tokens + count
    size_in_bytes = sum(len(d.text.encode()) for d in documents)
    return {
        "held_out_documents": len(documents),
        "held_out_bytes": size_in_bytes,
        "held_out_tokens": tokens,
        "nats_per_token": -log_p / tokens,
        "bits_per_byte": -log_p / math.log(2) / size_in_bytes,
        "mtp_agreement_on_held_out_text": agreed / drafts,
    }


@partial(nnx.jit, static_argnums=(5,))
def _generate(
    model: Transformer, ids: jax.Array, lengths: jax.Array, key: jax.Array, temperature: jax.Array, n: int
) -> jax.Array:
    """Extends rows ids [B, P + n] of `lengths` [B] tokens by n. Recomputes every row a token: simple, and exact."""
    rows = jnp.arange(ids.shape[0])

    def body(i: jax.Array, ids: jax.Array) -> jax.Array:
        streams = jax.vmap(model.streams)(ids)
        newest = jax.vmap(lambda s, at: jax.lax.dynamic_slice_in_dim(s, at, 1, axis=1))(streams, lengths + i - 1)
        logits = jax.vmap(model.logits)(newest)[:, 0]
        noise = jax.random.gumbel(jax.random.fold_in(key, i), logits.shape) * temperature[:, None]
        return ids.at[rows, lengths + i].set(jnp.argmax(logits + noise, axis=-1))

    return jax.lax.fori_loop(0, n, body, ids)


def generate(
    model: Transformer, prompts: list[list[int]], n: int, temperatures: list[float], seed: int = 0
) -> list[list[int]]:
    """Each prompt with n more tokens; temperature 0 is greedy."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    ids = np.zeros((len(prompts), lengths.max() + n), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    heat = jnp.asarray(temperatures, jnp.float32)
    out = np.asarray(_generate(model, jnp.asarray(ids), jnp.asarray(lengths), jax.random.key(seed), heat, n))
    return [row[: length + n].tolist() for row, length in zip(out, lengths, strict=True)]


@nnx.jit
def _drafts(model: Transformer, ids: jax.Array) -> jax.Array:
    streams = jax.vmap(model.streams)(ids)
    return jnp.argmax(jax.vmap(model.mtp_logits)(streams, ids), axis=-1)


def acceptance(model: Transformer, tokenizer: Tokenizer, documents: list[corpus.Document]) -> dict[str, float]:
    """Greedy decoding from the start of held-out documents: share of generated tokens the MTP block had drafted."""
    starts = [[BOS_ID, *tokenizer.encode(d.text).ids][:_PROMPT] for d in documents]
    prompts = [s for s in starts if len(s) == _PROMPT]
    accepted = drafted = 0
    for at in tqdm(range(0, len(prompts) - _BATCH + 1, _BATCH), desc="drafts"):
        ids = np.array(generate(model, prompts[at : at + _BATCH], _GENERATED, [0.0] * _BATCH))
        drafts = np.asarray(_drafts(model, jnp.asarray(ids)))  # row j drafts token j + 2
        for row, draft in zip(ids, drafts, strict=True):
            ends = np.flatnonzero(row[_PROMPT:] == EOS_ID)
            stop = _PROMPT + (int(ends[0]) + 1 if len(ends) else _GENERATED)
            same = draft[_PROMPT - 1 : stop - 2] == row[_PROMPT + 1 : stop]
            accepted, drafted = accepted + int(same.sum()), drafted + same.size
    return {"greedy_drafts": drafted, "mtp_acceptance_greedy": accepted / drafted}


PROMPTS = (
    "It was a dark and stormy night, and the captain",
    "My dear Miss Elliot, I am very sorry to",
    "In those days there was a king in the land, and he",
    "The sea was calm, and the great whale",
    '"Do you not want to know who has taken it?" cried',
    "When I was a young man I went to London, where I",
)


def samples(model: Transformer, tokenizer: Tokenizer, num: int, n: int) -> list[dict[str, str]]:
    num = min(num, len(PROMPTS))
    texts = PROMPTS[:num]
    prompts = [[BOS_ID, *tokenizer.encode(text).ids] for text in texts]
    rows = generate(model, prompts * 2, n, [0.0] * num + [0.7] * num) if num else []
    answers = []
    for prompt, row in zip(prompts * 2, rows, strict=True):
        ids = row[len(prompt) :]
        answers.append(tokenizer.decode(ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids))
    return [
        {"prompt": text, "greedy": greedy, "temperature_0.7": warm}
        for text, greedy, warm in zip(texts, answers[:num], answers[num:], strict=True)
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    path = Path(_CHECKPOINT.value)
    model, tokenizer = load_model(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    documents = corpus.split(corpus.load(places.cache()))[1]
    result = held_out(model, tokenizer, documents[: _MAX_DOCUMENTS.value or None], _WINDOW.value)
    print(json.dumps(result, indent=1), flush=True)
    step = max(len(documents) // max(_DRAFT_DOCUMENTS.value, 1), 1)  # across the books
    print(json.dumps(acceptance(model, tokenizer, documents[::step]), indent=1), flush=True)
    for sample in samples(model, tokenizer, _SAMPLES.value, _SAMPLE_TOKENS.value):
        print(json.dumps(sample, ensure_ascii=False, indent=1), flush=True)


if __name__ == "__main__":
    app.run(main)
