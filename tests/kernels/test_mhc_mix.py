"""Hyper-connections: the kernels of TPUs and CPUs against the reference, and what all must hold to."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mhc_mix import MixConfig, mhc_read, mhc_write, native
from pallas_kernels.target import CPU, HOST, Target

TPU, NATIVE = Target("tpu", "v6e", interpret=True), Target("cpu", HOST)
CONFIG = MixConfig(sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6)
S = 4


def site(num_tokens: int, width: int, seed: int = 0):
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0):
        return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)

    return normal(S, num_tokens, width), normal(24, S * width, scale=0.1), normal(24), normal(3)


@pytest.mark.parametrize("kernels", [TPU, NATIVE], ids=["tpu", "native"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 128), (16, 128), (130, 256)])
def test_kernels_equal_the_reference(num_tokens, width, kernels):
    streams, *params = site(num_tokens, width)
    want, got = mhc_read(streams, *params, CONFIG), mhc_read(streams, *params, CONFIG, kernels)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    out = streams[0] * 0.5
    written = [mhc_write(streams, out, want[1], want[2], target) for target in (CPU, kernels)]
    np.testing.assert_allclose(*written, atol=1e-5)


@pytest.mark.parametrize("target", [CPU, TPU, NATIVE], ids=["jnp", "tpu", "native"])
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


def test_native_bfloat16_is_rounded_once():
    streams, *params = site(7, 48)
    streams = streams.astype(jnp.bfloat16)
    want, got = (mhc_read(streams, *params, CONFIG, target) for target in (CPU, NATIVE))
    assert got[0].dtype == jnp.bfloat16
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7, atol=1e-5)
    written = [mhc_write(streams, got[0], *got[1:], target).astype(jnp.float32) for target in (CPU, NATIVE)]
    np.testing.assert_allclose(*written, rtol=2**-7, atol=1e-5)


def test_native_results_do_not_depend_on_the_other_tokens():
    streams, *params = site(21, 64)
    whole = mhc_read(streams, *params, CONFIG, NATIVE)
    for first, count in ((0, 1), (3, 8), (8, 13)):
        part = mhc_read(streams[:, first : first + count], *params, CONFIG, NATIVE)
        for i, (a, b) in enumerate(zip(part, whole, strict=True)):
            np.testing.assert_array_equal(a, b[first : first + count] if i == 0 else b[..., first : first + count])


def test_native_takes_four_streams_of_whole_vectors():
    assert native.supports(jnp.zeros((4, 1, 48)), NATIVE)
    assert not native.supports(jnp.zeros((4, 1, 40)), NATIVE) and not native.supports(jnp.zeros((2, 1, 48)), NATIVE)
    assert not native.supports(jnp.zeros((4, 1, 48)), CPU) and not native.supports(jnp.zeros((4, 1, 48)), TPU)


def test_shapes_are_checked():
    streams, fn, base, scale = site(8, 128)
    with pytest.raises(ValueError, match="mhc_read: fn"):
        mhc_read(streams, fn[:, 1:], base, scale, CONFIG)
    with pytest.raises(ValueError, match="mhc_write: out"):
        mhc_write(streams, streams[0, 1:], jnp.zeros((4, 8)), jnp.zeros((4, 4, 8)))
