"""Which experts a token uses: plain JAX and native code, by the formulas and against each other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from pallas_kernels.router import by_score, by_table
from pallas_kernels.target import CPU, HOST, Target, traced_for

NATIVE = Target("cpu", HOST)
TARGETS = pytest.mark.parametrize("target", [CPU, NATIVE], ids=["jnp", "native"])
K, SCALE = 4, 1.5


def run(target: Target, function: Callable, *args) -> tuple[np.ndarray, np.ndarray]:
    def traced(*args):
        with traced_for(target):
            return function(*args)

    lowered = jax.jit(traced).lower(*args)
    assert ("dsjax.route" in lowered.as_text()) == target.has_native_kernels
    experts, weights = map(np.asarray, lowered.compile()(*args))
    assert experts.dtype == np.int32 and weights.dtype == np.float32
    return experts, weights


def score(logits, bias, num_tokens=None):
    return by_score(logits, bias, K, SCALE, num_tokens)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(shape[0]).normal(0, scale, shape).astype(np.float32)


def scores(logits: np.ndarray) -> np.ndarray:
    return np.sqrt(np.logaddexp(logits.astype(np.float64), 0))


def weights_of(logits: np.ndarray, experts: np.ndarray) -> np.ndarray:
    chosen = np.take_along_axis(scores(logits), experts, axis=1)
    return chosen / chosen.sum(axis=1, keepdims=True) * SCALE


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 16), (1, 4), (3, 6), (9, 40), (300, 256)])
@TARGETS
def test_the_largest_biased_scores_are_chosen_and_the_scores_weigh(target, num_tokens, num_experts):
    """The last one is of several items."""
    logits, bias = normal(num_tokens, num_experts, scale=3), normal(num_experts, scale=0.5)
    experts, weights = run(target, score, logits, bias)
    np.testing.assert_array_equal(experts, np.argsort(-(scores(logits) + bias), axis=1)[:, :K])
    np.testing.assert_allclose(weights, weights_of(logits, experts), rtol=1e-6)


@pytest.mark.parametrize("num_experts", [6, 16, 70])
@TARGETS
def test_of_equal_scores_the_lowest_experts_are_chosen(target, num_experts):
    rng = np.random.default_rng(0)
    logits = rng.choice([-1.0, 0.5, 2.0], (50, num_experts)).astype(np.float32)
    logits[0] = 0
    bias = np.zeros(num_experts, np.float32)
    experts, _ = run(target, score, logits, bias)
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1, kind="stable")[:, :K])
    assert experts[0].tolist() == [0, 1, 2, 3]


@TARGETS
def test_biases_may_outweigh_all_scores(target):
    logits = normal(5, 20)
    bias = np.where(np.arange(20) < 10, -100.0, -np.arange(20)).astype(np.float32)
    experts, weights = run(target, score, logits, bias)
    assert (experts >= 10).all() and (np.diff(experts, axis=1) > -12).all()
    np.testing.assert_allclose(weights, weights_of(logits, experts), rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 400])
@TARGETS
def test_a_table_has_the_experts_of_token_ids(target, num_tokens):
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(20)[:3] for _ in range(50)]).astype(np.int32)
    ids = rng.integers(0, 50, num_tokens).astype(np.int32)
    logits = normal(num_tokens, 20, scale=3)
    experts, weights = run(target, lambda *args: by_table(*args, SCALE), logits, table, ids)
    np.testing.assert_array_equal(experts, table[ids])
    np.testing.assert_allclose(weights, weights_of(logits, experts), rtol=1e-6)


@TARGETS
def test_padding_has_no_expert(target):
    logits, bias, num_tokens = normal(7, 6), np.zeros(6, np.float32), np.int32(5)
    table, ids = np.arange(12, dtype=np.int32).reshape(6, 2) % 6, np.zeros(7, np.int32)
    for function, args in (
        (score, (logits, bias)),
        (lambda logits, table, ids, num=None: by_table(logits, table, ids, SCALE, num), (logits, table, ids)),
    ):
        (experts, weights), (all_experts, all_weights) = (
            run(target, function, *args, num_tokens),
            run(target, function, *args),
        )
        assert (experts[5:] == 6).all() and (all_experts < 6).all()
        np.testing.assert_array_equal(experts[:5], all_experts[:5])
        np.testing.assert_array_equal(weights[:5], all_weights[:5])


@TARGETS
def test_large_logits_and_what_is_not_a_number(target):
    logits = np.zeros((5, 6), np.float32)
    logits[0], logits[1], logits[2] = -200, [-50, 80, 1e30, -1e30, 5, 6], np.nan
    logits[3] = [-30, -31, -32, -33, -34, -80]
    experts, weights = run(target, score, logits, np.zeros(6, np.float32))
    assert not weights[0].any()  # all underflow
    assert experts[1].tolist() == [2, 1, 5, 4] and experts[3].tolist() == [0, 1, 2, 3]
    rest = [1, 3, 4]
    np.testing.assert_allclose(weights[rest], weights_of(logits[rest], experts[rest]), rtol=1e-6, atol=1e-30)
    assert np.isnan(weights[2]).all() and sorted(experts[2])[-1] < 6 and len(set(experts[2])) == K


def test_no_choice_depends_on_the_other_tokens():
    logits, bias = normal(40, 16), normal(16)
    whole = run(NATIVE, score, logits, bias)
    for some in (slice(0, 1), slice(5, 17)):
        for part, of_all in zip(run(NATIVE, score, logits[some], bias), whole, strict=True):
            np.testing.assert_array_equal(part, of_all[some])
