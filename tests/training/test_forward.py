"""The training forward against the model's own, and the optimizer's rules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.models.tiny import tiny_mixed
from dsjax.config import LayerKind
from dsjax.model.transformer import Transformer
from training import forward, optimizer
from training.train_nano import build, flat, is_trained, merge


@pytest.fixture(scope="module")
def model() -> Transformer:
    kinds = (LayerKind.CSA, LayerKind.HCA)  # hash and top-k routing; the MTP block is the sliding layer
    config = dataclasses.replace(tiny_mixed(), layer_kinds=kinds, sliding_window=16, index_topk=5)
    return Transformer(config, nnx.Rngs(0), with_mtp=True)


@pytest.fixture(scope="module")
def ids(model: Transformer) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 66), 0, model.config.vocab_size)


def test_logits_and_drafts_are_those_of_the_model(model: Transformer, ids: jax.Array):
    @nnx.jit
    def fast(model: Transformer, ids: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        run = forward.Run()
        last = forward.streams(model, ids[:, :64], run)
        logits = model.head(forward.hidden(model, last))
        drafts = model.head(forward.mtp_hidden(model, last, ids[:, 1:65], run))
        return logits.reshape(2, 64, -1), drafts.reshape(2, 64, -1), run.loads

    @nnx.jit
    def plain(model: Transformer, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        streams = model.streams(ids)
        return model.logits(streams), model.mtp_logits(streams, ids)

    logits, drafts, loads = fast(model, ids)
    expected_logits, expected_drafts = plain(model, ids[1, :64])
    np.testing.assert_allclose(logits[1], expected_logits, atol=2e-5)
    np.testing.assert_allclose(drafts[1, :63], expected_drafts, atol=2e-5)
    assert set(loads) == {"layers.0", "layers.1", "mtp.block"}
    assert all(abs(float(jnp.sum(load)) - 1) < 1e-6 for load in loads.values())


@pytest.mark.slow
def test_gradients_are_those_of_the_model(model: Transformer, ids: jax.Array):
    graph, trained, rest = nnx.split(model, lambda path, value: value.dtype == jnp.float32, ...)

    def fast(trained):
        model = nnx.merge(graph, trained, rest)
        x = jnp.tile(forward.hidden(model, forward.streams(model, ids[:, :64], forward.Run())), (2, 1))  # 256 rows
        return forward.cross_entropy(x, model.head.kernel[...], jnp.tile(ids[:, 1:65].reshape(-1), 2))

    def plain(trained):
        model = nnx.merge(graph, trained, rest)
        log_p = jax.nn.log_softmax(model(ids[:, :64]))
        return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:65, None], axis=-1))

    value, got = jax.jit(jax.value_and_grad(fast))(trained)
    expected_value, expected = jax.jit(jax.value_and_grad(plain))(trained)
    assert abs(float(value - expected_value)) < 1e-5
    got, expected = flat(got), flat(expected)
    # The mixing weights' gradient is that of the limit of the Sinkhorn iteration: 2 % of the largest at most apart.
    for path, want in expected.items():
        scale = float(jnp.max(jnp.abs(want))) + 1e-4
        np.testing.assert_allclose(got[path], want, atol=0.02 * scale, err_msg=path)


def test_capacity_drops_only_what_is_over_it(model: Transformer):
    ffn = model.layers[-1].ffn
    x = jax.random.normal(jax.random.key(2), (64, model.config.hidden_size))
    ids = jnp.arange(64)
    moe = nnx.jit(lambda ffn, x, ids: [forward._moe(ffn, x, ids, capacity)[0] for capacity in (None, 4.0, 0.5)])
    exact, roomy, tight = moe(ffn, x, ids)
    np.testing.assert_allclose(roomy, exact, atol=1e-5)
    same = jnp.all(jnp.abs(tight - exact) < 1e-5, axis=1)
    assert bool(same[0]) and not bool(jnp.all(same))  # the first tokens come first


def test_select_breaks_ties_by_index():
    scores = jnp.array([[0.0, -1.0, 0.0, 0.0, 2.0, 0.0], [-3.0, -1.0, -2.0, 5.0, 5.0, 5.0]])
    visible = jnp.array([[True] * 6, [True, True, True, False, False, False]])
    chosen = jax.jit(forward._select, static_argnums=2)(scores, visible, 3)
    assert chosen.tolist() == [[True, False, True, False, True, False], [True, True, True, False, False, False]]


def test_every_parameter_has_a_rule(model: Transformer):
    labels = {path: optimizer.label(path) for path in flat(nnx.state(model)) if is_trained(path)}
    assert labels["embed.embedding"] == "embed" and labels["head.kernel"] == "head"
    assert labels["layers.0.attn.wo_a.kernel"] == labels["layers.1.ffn.experts.w13"] == "muon"
    assert labels["layers.0.ffn.gate.kernel"] == labels["layers.0.hc_attn.fn"] == labels["norm.scale"] == "other"


def test_schedule_warms_up_then_falls_to_zero():
    factors = [optimizer.schedule(0.0, step, warm_up_steps=4) for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert optimizer.schedule(0.25, 100) == 0.75 and optimizer.schedule(1.0, 100) == 0.0


def test_starts_as_residual_connections_that_add_nothing():
    config = dataclasses.replace(tiny_mixed(), layer_kinds=(LayerKind.SLIDING,), sliding_window=16)
    template, params = build(config, np.ones(config.vocab_size, int), 0)
    model = merge(template, params)
    streams, logits = nnx.jit(lambda model, ids: (model.streams(ids), model(ids)))(model, jnp.arange(16))
    np.testing.assert_allclose(streams, jnp.broadcast_to(model.embed(jnp.arange(16)), streams.shape), rtol=1e-3)
    assert not jnp.any(logits)
