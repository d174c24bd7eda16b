"""The whole-sequence forward against every golden set: logits, greedy choices, MTP, and every layer's tensors."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax import checkpoint
from dsjax.config import LayerKind, ModelConfig
from dsjax.model.build import abstract, assemble
from dsjax.verify import verify
from tests.golden_sets import check_complete, sets

ATOL = 2e-4  # two independent implementations differ by up to 8e-5 on these sets (float32)


def test_every_set_is_there():
    check_complete()


@pytest.mark.parametrize("folder", sets(), ids=lambda f: f.name)
def test_logits_greedy_and_mtp(folder):
    results = list(verify(folder, ("full",)))
    assert results
    assert [r for r in results if not r.passes(ATOL)] == []
    if folder.name in ("g7_mtp", "q1_fp8fp4"):
        assert all(r.mtp_difference is not None for r in results)


@pytest.mark.parametrize("folder", [f for f in sets() if (f / "layers.npz").is_file()], ids=lambda f: f.name)
def test_inner_tensors(folder):
    config = ModelConfig.from_dir(folder)
    golden, layers = np.load(folder / "golden.npz"), np.load(folder / "layers.npz")
    ids = golden[f"p{int(layers['prompt'])}_ids"]
    params = checkpoint.load_params(folder, config, include_mtp=False)
    graph, state = assemble(config, params, np.dtype("float32"), with_mtp=False)

    @jax.jit
    def run(state, ids):
        taps = {}
        nnx.merge(graph, state)(ids, tap=taps.__setitem__)
        return taps

    compare_inner(jax.tree.map(np.asarray, run(state, ids)), layers, config)


def compare_inner(got: dict[str, np.ndarray], layers, config: ModelConfig) -> None:
    """Taps of a prompt's positions (rows in order) against a set's layers.npz; sets compare as sets."""
    at = layers["positions"]
    compared = set()
    for name in layers.files:
        if name in ("prompt", "positions") or name.endswith("router_w"):
            continue
        want = layers[name]
        if name.endswith("router_idx"):
            chosen, weights = got[name][at], got[name.replace("router_idx", "router_w")][at]
            order, want_order = np.argsort(chosen, axis=1), np.argsort(want, axis=1)
            assert (np.take_along_axis(chosen, order, 1) == np.take_along_axis(want, want_order, 1)).all(), name
            want_weights = layers[name.replace("router_idx", "router_w")]
            np.testing.assert_allclose(
                np.take_along_axis(weights, order, 1), np.take_along_axis(want_weights, want_order, 1), atol=ATOL
            )
        elif name.endswith("index_topk"):
            mask = got[name.replace("index_topk", "index_mask")][at]
            for row, (has, wants) in enumerate(zip(mask, want, strict=True)):
                assert set(np.flatnonzero(has)) == set(wants[wants >= 0].tolist()), f"{name} at position {at[row]}"
        elif name.endswith("compressed_kv"):
            np.testing.assert_allclose(got[name], want, atol=ATOL, rtol=0, err_msg=name)
        elif name.endswith("index_scores"):
            if name not in got:
                continue  # the paged step scores only where there is a choice
            layer = int(name[1 : name.index(".")])
            assert config.layer_kinds[layer] is LayerKind.CSA
            np.testing.assert_allclose(got[name][at], want, atol=ATOL, rtol=0, err_msg=name)
        else:
            np.testing.assert_allclose(got[name][at], want, atol=ATOL, rtol=1e-4, err_msg=name)
        compared.add(name.rpartition(".")[2])
    assert {"attn_in", "attn_out", "ffn_in", "ffn_out", "streams_out", "router_idx"} <= compared


@pytest.mark.parametrize("folder", sets(), ids=lambda f: f.name)
def test_modules_and_checkpoint_agree_on_every_parameter(folder):
    config = ModelConfig.from_dir(folder)
    with_mtp = checkpoint.has_mtp(folder)
    _, state = abstract(config, np.dtype("float32"), with_mtp=with_mtp)
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert shapes == {name: shape for name, (shape, _) in checkpoint.expected_params(config, with_mtp).items()}


@pytest.mark.slow
def test_batched_forward_equals_single():
    """[B, S] is B sequences, and the forward can be differentiated."""
    from configs.models import MODELS
    from dsjax.model.transformer import Transformer

    config = MODELS["tiny-mixed"]()
    model = Transformer(config, nnx.Rngs(0))
    ids = jax.random.randint(jax.random.key(1), (2, 40), 0, config.vocab_size)
    forward = nnx.jit(lambda model, ids: model(ids))
    np.testing.assert_allclose(forward(model, ids)[1], forward(model, ids[1]), atol=1e-4)

    @nnx.jit
    @nnx.grad
    def gradient(model):
        return jax.nn.logsumexp(model(ids[0])).sum()

    grads = {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(gradient(model))}
    floating = {n: g for n, g in grads.items() if np.issubdtype(g.dtype, np.floating)}
    assert all(np.isfinite(g).all() for g in floating.values())
    untouched = [n for n, g in floating.items() if not np.any(np.asarray(g))]
    # the indexer's choice and the router's bias have no gradient
    assert all(".indexer." in n or n.endswith("gate.bias") for n in untouched), untouched
