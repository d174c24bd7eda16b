"""Hyper-connections: the TPU's kernels against the reference, and what both must hold to."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mhc_mix import MixConfig, mhc_read, mhc_write
from pallas_kernels.target import CPU, Target

TPU = Target("tpu", "v6e", interpret=True)
CONFIG = MixConfig(sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6)
S = 4


def site(num_tokens: int, width: int, seed: int = 0):
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0):
        return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)

    return normal(S, num_tokens, width), normal(24, S * width, scale=0.1), normal(24), normal(3)


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 128), (16, 128), (130, 256)])
def test_kernels_equal_the_reference(num_tokens, width):
    streams, *params = site(num_tokens, width)
    want, got = mhc_read(streams, *params, CONFIG), mhc_read(streams, *params, CONFIG, TPU)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    out = streams[0] * 0.5
    written = [mhc_write(streams, out, want[1], want[2], target) for target in (CPU, TPU)]
    np.testing.assert_allclose(*written, atol=1e-5)


@pytest.mark.parametrize("target", [CPU, TPU], ids=["jnp", "tpu"])
def test_mixing_is_doubly_stochastic_and_writing_is_the_formula(target):
    streams, *params = site(8, 128)
    x, post, comb = (np.asarray(a) for a in mhc_read(streams, *params, CONFIG, target))
    assert x.shape == (8, 128)
    np.testing.assert_allclose(comb.sum(axis=0), 1, atol=1e-4)  # columns are normalised last
    np.testing.assert_allclose(comb.sum(axis=1), 1, atol=2e-2)
    assert (post > 0).all() and (post < 2).all()
    out = np.asarray(streams[1])
    mixed = mhc_write(streams, jnp.asarray(out), jnp.asarray(post), jnp.asarray(comb), target)
    want = post[:, :, None] * out + np.einsum("jkt,jtd->ktd", comb, np.asarray(streams))
    np.testing.assert_allclose(mixed, want, atol=1e-5)


def test_shapes_are_checked():
    streams, fn, base, scale = site(8, 128)
    with pytest.raises(ValueError, match="mhc_read: fn"):
        mhc_read(streams, fn[:, 1:], base, scale, CONFIG)
    with pytest.raises(ValueError, match="mhc_write: out"):
        mhc_write(streams, streams[0, 1:], jnp.zeros((4, 8)), jnp.zeros((4, 4, 8)))
