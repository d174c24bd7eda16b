"""`sample` against the textbook in numpy float64: what may be drawn, with which probability, and what is reported."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.runner.sampling import FLAGS, FLOATS, PROMPT_BIT, SamplingBatch, SlotTables, sample

V, R, SLOTS = 50, 64, 64
DEFAULTS = {"top_p": 1.0, "repetition_penalty": 1.0}


@functools.cache
def compiled():
    return jax.jit(sample)


def batch_of(rows: list[dict], flags: tuple[str, ...] | None = None) -> SamplingBatch:
    """Rows of parameters; padding rows up to R. `position` and `seed` are those of the draw."""
    f = {name: np.full(R, DEFAULTS.get(name, 0.0), np.float32) for name in FLOATS}
    slot, samples = np.full(R, 1 << 30, np.int32), np.zeros(R, bool)
    position, top_k, seed = np.zeros(R, np.int32), np.zeros(R, np.int32), np.zeros((R, 2), np.uint32)
    for r, row in enumerate(rows):
        slot[r], samples[r] = row.get("slot", r), True
        position[r], top_k[r], seed[r, 0] = row.get("position", 1), row.get("top_k", 0), row.get("seed", 0)
        for name in FLOATS:
            f[name][r] = row.get(name, f[name][r])
    on = FLAGS if flags is None else flags
    return SamplingBatch(
        slot=jnp.asarray(slot),
        samples=jnp.asarray(samples),
        position=jnp.asarray(position),
        seed=jnp.asarray(seed),
        top_k=jnp.asarray(top_k),
        next_token=jnp.zeros(R, jnp.int32),
        token_row=jnp.zeros(R, jnp.int32),
        token_is_last=jnp.zeros(R, bool),
        flags={name: jnp.asarray(name in on) for name in FLAGS},
        **{name: jnp.asarray(f[name]) for name in FLOATS},
    )


def tables(counts=None, bias=None) -> SlotTables:
    slots = SlotTables.create(SLOTS, V)
    return slots._replace(
        counts=slots.counts if counts is None else jnp.asarray(counts, jnp.int32),
        bias=slots.bias if bias is None else jnp.asarray(bias, jnp.float32),
    )


def run(logits, rows, slots=None, flags=None):
    padded = np.full((R, V), np.nan, np.float32)  # padding rows may hold anything
    padded[: len(rows)] = logits
    tokens, logprobs, slots = compiled()(jnp.asarray(padded), batch_of(rows, flags), slots or tables())
    return np.asarray(tokens)[: len(rows)], jax.tree.map(np.asarray, logprobs), jax.tree.map(np.asarray, slots)


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What may be drawn: min_p, then top_k, then the fewest of the most likely tokens that reach top_p."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0
    p /= p.sum()
    kept = order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1] if top_p < 1 else order
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def draws(logits, num, **params):
    """`num` tokens of one distribution: other positions, the same seed."""
    found = []
    for start in range(0, num, R):
        rows = [{"temperature": 1.0, "seed": 11, **params, "position": start + i + 1} for i in range(R)]
        found.append(run(np.tile(logits, (R, 1)), rows)[0])
    return np.concatenate(found)[:num]


def some_logits(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, (rows, V)).astype(np.float32)


def test_greedy_takes_the_lowest_index_of_the_maximum():
    logits = some_logits(0, 3)
    logits[1, [7, 30]] = 9.0
    tokens, _, slots = run(logits, [{}, {}, {}])
    assert tokens.tolist() == [int(logits[0].argmax()), 7, int(logits[2].argmax())]
    assert slots.last_token.tolist()[:3] == tokens.tolist()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    num = 4096
    logits = some_logits(1)[0]
    want = probabilities(logits, **params)
    counts = np.bincount(draws(logits, num, **params), minlength=V)
    assert counts[want == 0].sum() == 0, "something excluded was drawn"
    # chi-square over cells of at least 5 expected draws, the others together; the seed is fixed, so this is exact
    big = want * num >= 5
    expected = np.append(want[big] * num, want[~big].sum() * num)
    seen = np.append(counts[big], counts[~big].sum())
    keep = expected > 0.5
    statistic = ((seen - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = max(keep.sum() - 1, 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 1e-9, (statistic, freedom)


def test_top_k_keeps_ties_of_the_last_one_kept_and_all_of_more_than_there_are():
    logits = np.full(V, -20.0, np.float32)
    logits[[3, 5, 9]] = 1.0
    assert set(draws(logits, 256, top_k=2)) == {3, 5, 9}
    assert set(draws(some_logits(2)[0] * 0, 512, top_k=1000)) > set(range(40))


def test_extreme_parameters_stay_finite():
    logits = some_logits(3)[0]
    best = int(logits.argmax())
    for params in ({"temperature": 1e-6}, {"temperature": 1e-40}, {"top_p": 1e-7}, {"min_p": 1.0}):
        assert set(draws(logits, 64, **params)) == {best}, params
    logits[:] = -np.inf  # all but one excluded, as a bias may do
    logits[4] = 2.0
    assert set(draws(logits, 64, top_p=0.5, top_k=3)) == {4}
    assert set(draws(logits, 64)) == {4}
    assert set(draws(logits, 64, temperature=1e4)) == {4}


def test_a_seeded_draw_depends_on_neither_company_nor_row_nor_slot():
    logits = some_logits(4)[0]
    me = {"temperature": 1.0, "seed": 99, "position": 17, "top_p": 0.9}
    alone, _, _ = run(logits[None], [me])
    for seed in range(6):
        others = [{"temperature": 0.1 + 0.2 * i, "seed": seed + i, "top_k": i, "min_p": 0.01 * i} for i in range(5)]
        place = seed % 6
        rows = [*others[:place], {**me, "slot": 40 + seed}, *others[place:]]
        many = some_logits(100 + seed, 6)
        many[place] = logits
        assert run(many, rows)[0][place] == alone[0]
    assert run(logits[None], [me], flags=("random", "filter"))[0] == alone[0]
    spread = {int(run(logits[None], [{**me, "position": p}])[0][0]) for p in range(30)}
    assert len(spread) > 5
    assert len({int(run(logits[None], [{**me, "seed": s}])[0][0]) for s in range(30)}) > 5


def test_penalties_are_those_of_the_api():
    logits = np.linspace(-2, 2, V, dtype=np.float32)
    counts = np.full((SLOTS, V), 12345)  # another's leftovers
    mine = np.zeros(V, int)
    mine[49], mine[48], mine[10] = 3, PROMPT_BIT, PROMPT_BIT | 1
    counts[2] = mine
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    outputs, seen = mine & (PROMPT_BIT - 1), mine > 0
    want = np.where(seen, np.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    want = want - 0.25 * outputs - 0.5 * (outputs > 0)
    tokens, logprobs, slots = run(
        np.stack([logits, logits]), [{"slot": 2, **penalties}, {"slot": 5}], tables(counts=counts)
    )
    assert tokens.tolist() == [int(want.argmax()), 49] == [47, 49]
    # reported are the model's own probabilities
    own = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert logprobs.chosen[:2] == pytest.approx(own[[47, 49]], abs=1e-5)
    assert logprobs.rank[:2].tolist() == [3, 1]
    # what was drawn counts from now on, in its own slot alone
    assert (slots.counts[2] - mine).tolist() == [int(i == 47) for i in range(V)]
    assert slots.counts[7].tolist() == [12345] * V
    for name, value in penalties.items():  # each alone
        one = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, name: value}
        factor = one["repetition_penalty"]
        expected = np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)
        expected = expected - one["frequency_penalty"] * outputs - one["presence_penalty"] * (outputs > 0)
        drawn = run(logits[None], [{"slot": 2, **one}], tables(counts=counts))[0]
        assert drawn[0] == expected.argmax()


def test_bias_is_the_slots_and_only_where_asked_for():
    logits = some_logits(5)[0]
    bias = np.full((SLOTS, V), np.nan)  # another's leftovers
    bias[3] = 0
    bias[3, 20], bias[3, int(logits.argmax())] = 100.0, -np.inf
    rows = [{"slot": 3, "use_bias": 1.0}, {"slot": 4}]
    tokens, logprobs, _ = run(np.stack([logits, logits]), rows, tables(bias=bias))
    assert tokens.tolist() == [20, int(logits.argmax())]
    assert logprobs.rank[0] == 1 + (logits > logits[20]).sum()


def test_logprobs_and_ranks():
    logits = some_logits(6, 4)
    tokens, logprobs, _ = run(logits, [{"temperature": 1.0, "seed": i} for i in range(4)])
    own = logits.astype(np.float64)
    own -= np.log(np.exp(own).sum(axis=1, keepdims=True))
    for r, token in enumerate(tokens):
        assert logprobs.chosen[r] == pytest.approx(own[r, token], abs=1e-5)
        assert logprobs.rank[r] == 1 + (own[r] > own[r, token]).sum()
        order = np.argsort(-own[r])[:20]
        assert logprobs.top_ids[r].tolist() == order.tolist()
        assert logprobs.top[r] == pytest.approx(own[r, order], abs=1e-5)


def test_padding_rows_write_nothing_and_read_no_nan():
    slots = tables(counts=np.arange(SLOTS * V).reshape(SLOTS, V))
    slots = slots._replace(last_token=jnp.arange(SLOTS, dtype=jnp.int32) + 100)
    tokens, _, after = run(some_logits(7, 2), [{"slot": 9}, {"slot": SLOTS - 1}], slots)
    assert after.last_token.tolist() == [*range(100, 109), int(tokens[0]), *range(110, 163), int(tokens[1])]
    changed = np.argwhere(np.asarray(after.counts) != np.arange(SLOTS * V).reshape(SLOTS, V)).tolist()
    assert changed == [[9, int(tokens[0])], [SLOTS - 1, int(tokens[1])]]
