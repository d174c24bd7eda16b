"""Running compression state: any cut of the tokens into steps gives the entries of pooling whole windows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.compress import Pieces, compress

WIDTH = 6


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
    of_token, row, window, first, complete, last = [], [], [], [], [], []
    for r, (start, n) in enumerate(rows):
        for p in range(start, start + n):
            if p == start or p % ratio == 0:
                row.append(r)
                window.append(p // ratio)
                first.append(p == start)
                complete.append((p // ratio + 1) * ratio <= start + n)
            of_token.append(len(row) - 1)
        last.append(len(row) - 1)
    pad = num_tokens - len(row)
    of_token += [num_tokens] * (num_tokens - len(of_token))
    array = lambda x, fill: jnp.array(x + [fill] * pad)  # noqa: E731
    return Pieces(
        of_token=None if decode else jnp.array(of_token),
        row=array(row, len(rows)),
        window=array(window, 0),
        first=array(first, False),
        complete=array(complete, False),
        entry_slot=array([NOWHERE] * len(row), NOWHERE),
        last_of_row=jnp.array(last),
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("cuts", [(1,) * 30, (3, 1, 8, 2, 5, 11), (30,), (7, 16, 7), (4, 4, 4, 18)])
def test_any_cut_gives_the_same_entries(cuts, ratio, overlap):
    rng = np.random.default_rng(0)
    channels = WIDTH * (2 if overlap else 1)
    # two rows; the second is 5 tokens ahead, so that windows of both close at different times
    data = [(rng.normal(size=(n, channels)), 30 * rng.normal(size=(n, channels))) for n in (30, 35)]
    data = [(v.astype(np.float32), z.astype(np.float32)) for v, z in data]
    state = jnp.full((2, 3, channels + (WIDTH if overlap else 0)), jnp.nan)  # never written
    got: list[dict[int, np.ndarray]] = [{}, {}]
    run = jax.jit(compress, static_argnames=("ratio", "overlap"))
    starts = [0, 0]
    for step, cut in enumerate(cuts):
        lengths = [cut, cut + 5 if step == 0 else cut]
        decode = lengths == [1, 1]
        total = 2 if decode else 72  # one shape, whatever the cut: one program to compile
        values, logits = np.full((2, total, channels), np.nan, np.float32)
        token = 0
        for (v, z), start, n in zip(data, starts, lengths, strict=True):
            values[token : token + n], logits[token : token + n] = v[start : start + n], z[start : start + n]
            token += n
        pieces = _pieces(list(zip(starts, lengths, strict=True)), ratio, total, decode)
        pooled, state = run(
            values, np.nan_to_num(logits), pieces, state, jnp.array(starts), ratio=ratio, overlap=overlap
        )
        for i in range(len(pieces.row)):
            if pieces.complete[i]:
                got[int(pieces.row[i])][int(pieces.window[i])] = np.asarray(pooled[i])
        starts = [start + n for start, n in zip(starts, lengths, strict=True)]
    for r, (v, z) in enumerate(data):
        want = _pooled(v, z, ratio, overlap)
        assert sorted(got[r]) == list(range(len(want)))
        # sums of up to 16 terms, merged in another order
        np.testing.assert_allclose(np.array([got[r][w] for w in range(len(want))]), want, atol=1e-5)


def test_shapes_are_checked():
    pieces = _pieces([(0, 2)], 4, 2, False)
    with pytest.raises(ValueError, match="do not fit"):
        compress(
            jnp.zeros((2, 12)), jnp.zeros((2, 12)), pieces, jnp.zeros((1, 3, 12)), jnp.zeros(1), ratio=4, overlap=True
        )
