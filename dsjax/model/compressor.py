"""The compressors of CSA and HCA layers and of the indexer: m tokens become one entry (spec 2.5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.model.norm import RMSNorm
from dsjax.model.param import HIGHEST, Linear, constant
from dsjax.model.rope import cos_sin
from pallas_kernels.compress import Finish, finish


class Compressor(nnx.Module):
    """Projects tokens to (value, logit) pairs; a window's entry is the softmax-weighted sum of its values.

    An overlapping compressor (CSA, indexer) has twice the channels: the first half (series a) of window w - 1
    and the second half (series b) of window w make entry w.
    """

    def __init__(self, hidden: int, width: int, ratio: int, overlap: bool, freq, eps: float, rngs: nnx.Rngs, dtype):
        channels = width * (2 if overlap else 1)
        self.wkv = Linear(rngs, (hidden, channels), ("embed", None), dtype)
        self.wgate = Linear(rngs, (hidden, channels), ("embed", None), dtype)
        self.ape = constant((ratio, channels), (None, None), 0.0)
        self.norm = RMSNorm(width, eps, axis=None)
        self.ratio, self.width, self.overlap = ratio, width, overlap
        self.freq = tuple(float(f) for f in freq)  # static, hashable

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, D], positions [T] -> values and logits [T, channels], float32."""
        values = self.wkv(x, jnp.float32, HIGHEST)
        logits = self.wgate(x, jnp.float32, HIGHEST) + self.ape[...][jax.lax.rem(positions, self.ratio)]
        return values, logits

    def finishing(self, window: jax.Array) -> Finish:
        """What becomes of the pooled entries of windows [NP]: normalised, rotated at the window's first token."""
        angles = cos_sin(jnp.asarray(self.freq, jnp.float32), window * self.ratio)
        return Finish(self.norm.scale[...], self.norm.eps, *angles)

    def full(self, x: jax.Array) -> jax.Array:
        """x [S, D], one whole sequence -> its S // ratio entries [C, width]."""
        m, num = self.ratio, x.shape[0] // self.ratio
        values, logits = self.project(x[: num * m], jnp.arange(num * m))
        values, logits = values.reshape(num, m, -1), logits.reshape(num, m, -1)
        if self.overlap:
            w = self.width
            # window w - 1's series a; absent (-inf) for w = 0
            before_v = jnp.pad(values[:-1, :, :w], ((1, 0), (0, 0), (0, 0)))
            before_l = jnp.pad(logits[:-1, :, :w], ((1, 0), (0, 0), (0, 0)), constant_values=-jnp.inf)
            values = jnp.concatenate([before_v, values[:, :, w:]], axis=1)
            logits = jnp.concatenate([before_l, logits[:, :, w:]], axis=1)
        pooled = jnp.sum(jax.nn.softmax(logits, axis=1) * values, axis=1)
        return finish(pooled, self.finishing(jnp.arange(num)), x.dtype)


def num_visible(positions: jax.Array, ratio: int) -> jax.Array:
    """How many entries a query at each position may use: those whose last token it has reached."""
    return jax.lax.div(positions + 1, ratio)
