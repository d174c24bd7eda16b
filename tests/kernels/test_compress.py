"""Running compression state: any cut of the tokens into steps gives the entries of pooling whole windows at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.compress import Finish, Pieces, compress, finish
from pallas_kernels.target import CPU, Target
from tests.kernels import tpu_races

HERE, TPU = Target("cpu", "host"), Target("tpu", "v6e", interpret=True)
WIDTH, SLOTS = 128, 5
SLOT = (3, 1)  # of the two rows


def _pooled(values, logits, ratio, overlap):
    """Entries of whole windows, straight from the definition."""
    out = []
    for w in range(len(values) // ratio):
        span = slice(w * ratio, (w + 1) * ratio)
        v, z = values[span], logits[span]
        if overlap:
            v, z = v[:, WIDTH:], z[:, WIDTH:]
            if w:
                before = slice((w - 1) * ratio, w * ratio)
                v = np.concatenate([values[before, :WIDTH], v])
                z = np.concatenate([logits[before, :WIDTH], z])
        p = np.exp(z - z.max(axis=0))
        out.append((p * v).sum(axis=0) / p.sum(axis=0))
    return np.array(out).reshape(-1, WIDTH)


def _pieces(rows, ratio, num_tokens, decode):
    """Pieces of rows [(start, length)], packed one after the other, padded to num_tokens tokens and pieces."""
    of_token, row, window, first, complete, last_token, last = [], [], [], [], [], [], []
    for r, (start, n) in enumerate(rows):
        for p in range(start, start + n):
            if p == start or p % ratio == 0:
                row.append(r)
                window.append(p // ratio)
                first.append(p == start)
                complete.append((p // ratio + 1) * ratio <= start + n)
                last_token.append(0)
            last_token[-1] = len(of_token)
            of_token.append(len(row) - 1)
        last.append(len(row) - 1)
    pad = num_tokens - len(row)  # last: a row without tokens
    of_token += [num_tokens] * (num_tokens - len(of_token))
    array = lambda x, fill: jnp.array(x + [fill] * pad)  # noqa: E731
    return Pieces(
        of_token=None if decode else jnp.array(of_token),
        row=array(row, len(rows)),
        window=array(window, 0),
        first=array(first, False),
        complete=array(complete, False),
        entry_slot=array([NOWHERE] * len(row), NOWHERE),
        last_token=array(last_token, num_tokens),
        last_of_row=jnp.array([*last, 0]),
    )


def _finish(window, ratio) -> Finish:
    angle = (window * ratio)[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])
    return Finish(jnp.linspace(0.5, 2, WIDTH), 1e-6, jnp.cos(angle), jnp.sin(angle))


@functools.partial(jax.jit, static_argnames=("ratio", "overlap", "target"))
def _step(values, logits, pieces, states, slots, positions, *, ratio, overlap, target):
    return compress(
        values,
        logits,
        pieces,
        states,
        slots,
        positions,
        _finish(pieces.window, ratio),
        ratio=ratio,
        overlap=overlap,
        dtype=jnp.float32,
        target=target,
    )


@pytest.mark.parametrize("target", [CPU, HERE, TPU], ids=["jnp", "native", "tpu"])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
def test_any_cut_gives_the_same_entries(ratio, overlap, target):
    for cuts in [(1,) * 30, (3, 1, 8, 2, 5, 11), (30,), (7, 16, 7), (4, 4, 4, 18)]:
        _check_cuts(cuts, ratio, overlap, target)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (32, False)])
def test_the_steps_of_a_grid_are_cuts_like_any_other(ratio, overlap):
    """The kernel's have 128 tokens; rows and windows begin and end inside them and go on over several."""
    _check_cuts((146, 47), ratio, overlap, TPU, lengths=(193, 198), total=384)


def _check_cuts(cuts, ratio, overlap, target, lengths=(30, 35), total=72):
    rng = np.random.default_rng(0)
    channels = WIDTH * (2 if overlap else 1)
    # two rows; the second is 5 tokens ahead, so that windows of both close at different times
    data = [(rng.normal(size=(n, channels)), 30 * rng.normal(size=(n, channels))) for n in lengths]
    data = [(v.astype(np.float32), z.astype(np.float32)) for v, z in data]
    states = jnp.full((SLOTS, 3 * channels), jnp.nan)  # never written
    got: list[dict[int, np.ndarray]] = [{}, {}]
    starts = [0, 0]
    for step, cut in enumerate(cuts):
        lengths = [cut, cut + 5 if step == 0 else cut]
        decode = lengths == [1, 1]
        num = 3 if decode else total  # one shape, whatever the cut: one program to compile; a third row without tokens
        values, logits = np.full((2, num, channels), np.nan, np.float32)
        token = 0
        for (v, z), start, n in zip(data, starts, lengths, strict=True):
            values[token : token + n], logits[token : token + n] = v[start : start + n], z[start : start + n]
            token += n
        pieces = _pieces(list(zip(starts, lengths, strict=True)), ratio, num, decode)
        entries, states = _step(
            values,
            np.nan_to_num(logits),
            pieces,
            states,
            jnp.array([*SLOT, NOWHERE]),
            jnp.array([*starts, 0]),
            ratio=ratio,
            overlap=overlap,
            target=target,
        )
        for i in range(len(pieces.row)):
            if pieces.complete[i]:
                got[int(pieces.row[i])][int(pieces.window[i])] = np.asarray(entries[i])
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
    for r, (v, z) in enumerate(data):
        pooled = jnp.asarray(_pooled(v, z, ratio, overlap))
        want = np.asarray(finish(pooled, _finish(jnp.arange(len(pooled)), ratio), jnp.float32))
        assert sorted(got[r]) == list(range(len(want)))
        # sums of up to 256 terms, merged in another order; entries are of order 1
        np.testing.assert_allclose(np.array([got[r][w] for w in range(len(want))]), want, atol=2e-5)
    assert np.isnan(states[np.array([0, 2, 4])]).all()  # of no row


@pytest.mark.parametrize("decode", [True, False])
def test_no_races(decode):
    rows = [(5, 1), (8, 1)] if decode else [(5, 4), (8, 7)]
    num = 3 if decode else 16
    rng = np.random.default_rng(0)
    values, logits = rng.normal(size=(2, num, 2 * WIDTH)).astype(np.float32)
    states = jnp.asarray(rng.normal(size=(SLOTS, 6 * WIDTH)), jnp.float32)
    pieces = _pieces(rows, 4, num, decode)
    slots, positions = jnp.array([*SLOT, NOWHERE]), jnp.array([5, 8, 0])

    def call(target, *arrays):
        return _step(*arrays, ratio=4, overlap=True, target=target)

    arrays = values, logits, pieces, states, slots, positions
    got, want = tpu_races.run(call, *arrays), call(CPU, *arrays)
    complete = np.asarray(pieces.complete)
    assert complete.sum() == (0 if decode else 2)
    np.testing.assert_allclose(got[0][complete], np.asarray(want[0])[complete], atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)


def test_shapes_are_checked():
    pieces = _pieces([(0, 2)], 4, 2, False)
    with pytest.raises(ValueError, match="do not fit"):
        compress(
            jnp.zeros((2, 12)),
            jnp.zeros((2, 12)),
            pieces,
            jnp.zeros((1, 3 * 18)),
            jnp.zeros(1, int),
            jnp.zeros(1, int),
            Finish(jnp.ones(6), 1e-6, jnp.zeros((2, 1)), jnp.zeros((2, 1))),
            ratio=4,
            overlap=True,
            dtype=jnp.float32,
        )
