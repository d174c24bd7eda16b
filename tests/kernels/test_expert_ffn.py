"""Every form of the experts' sum against a plain loop over tokens and their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import Matrices, expert_ffn
from pallas_kernels.expert_ffn.slots import in_slots, pays, slots_of_expert
from pallas_kernels.grouped_matmul import native
from pallas_kernels.target import CPU, Target

D, F, E, K = 32, 16, 16, 4
LIMIT = 1.5  # most gates and ups of normal numbers are within it, some are not


def matrices(dtype: str = "float32") -> Matrices:
    rng = np.random.default_rng(0)
    w13, w2 = rng.normal(size=(E, D, 2 * F)) / D**0.5, rng.normal(size=(E, F, D)) / F**0.5
    return Matrices(jnp.asarray(w13, dtype), jnp.asarray(w2, dtype))


def tokens(num: int, even: bool, used: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, experts (those of tokens past `used` are none), weights; not `even`: all tokens on the same experts."""
    rng = np.random.default_rng(num)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(num)]).astype(np.int32)
    if not even:
        experts[:] = experts[0]
    experts[used:] = E
    return rng.normal(size=(num, D)).astype(np.float32), experts, rng.uniform(size=(num, K)).astype(np.float32)


def loop(x, experts, weights, matrices: Matrices) -> np.ndarray:
    w13, w2 = (np.asarray(w, np.float64) for w in matrices[:2])
    out = np.zeros(x.shape)
    for t, k in np.argwhere(experts < E):
        gate, up = np.split(x[t] @ w13[experts[t, k]], 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        out[t] += weights[t, k] * (gate / (1 + np.exp(-gate)) * up) @ w2[experts[t, k]]
    return out


def groups(x, experts, weights, matrices):
    return expert_ffn(x, experts, weights, matrices, E, limit=LIMIT, target=Target("cpu", "host"))


def tiles(x, experts, weights, matrices):
    return expert_ffn(x, experts, weights, matrices, E, limit=LIMIT, target=CPU)


def slots(x, experts, weights, matrices):
    return in_slots(x, experts, weights, matrices, 1, LIMIT)


FORMS = pytest.mark.parametrize("form", [groups, slots, tiles], ids=["groups", "slots", "tiles"])


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize(("num", "used"), [(1, 1), (2, 2), (5, 3), (8, 8), (40, 33), (200, 200), (16, 0)])
@FORMS
def test_every_form_is_the_loop(num, used, even, form):
    x, experts, weights = tokens(num, even, used)
    got = jax.jit(form)(x, experts, weights, matrices())
    np.testing.assert_allclose(got, loop(x, experts, weights, matrices()), atol=1e-5)
    assert not np.any(got[used:])


@pytest.mark.parametrize("num", [1, 2, 40])
@FORMS
def test_bfloat16_is_accumulated_in_float32(num, form):
    x, experts, weights = tokens(num, True, num)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    stacks = matrices("bfloat16")
    got = jax.jit(form)(jnp.asarray(x, jnp.bfloat16), experts, weights, stacks)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, loop(x, experts, weights, stacks), atol=0.02)  # hidden is rounded to 8 bits


@FORMS
def test_what_is_not_a_number_stays_with_its_token(form):
    x, experts, weights = tokens(40, False, 40)  # most tokens are past their experts' slots
    x[[0, 7]] = np.nan
    got = np.asarray(jax.jit(form)(x, experts, weights, matrices()))
    assert np.isnan(got[[0, 7]]).all()
    assert np.isfinite(np.delete(got, [0, 7], axis=0)).all()


def test_slots_hold_what_even_choices_fill():
    rng = np.random.default_rng(0)
    for num in (16, 32, 512):
        slots = slots_of_expert(num, num * K, E)
        counts = [np.bincount(np.argsort(rng.random((num, E)))[:, :K].ravel(), minlength=E) for _ in range(100)]
        assert np.mean(np.array(counts) > slots) < 0.04
        assert slots < 2.1 * num * K / E
    assert slots_of_expert(5, 5 * K, E) == 5  # no expert can have more


def test_slots_are_for_many_tokens_where_the_library_is_faster(monkeypatch):
    assert not pays(jnp.float32, 1000 * E, E)
    monkeypatch.setattr(native, "has_feature", {"avx512bf16", "amx-bf16"}.__contains__)
    assert pays(jnp.bfloat16, 16 * E + 1, E)
    assert not pays(jnp.bfloat16, 16 * E, E)
    monkeypatch.setattr(native, "has_feature", {"avx512bf16"}.__contains__)
    assert not pays(jnp.bfloat16, 1000 * E, E)


@pytest.mark.parametrize("features", [{"avx512bf16"}, set()], ids=["groups", "slots"])
def test_weights_are_neither_copied_nor_widened(monkeypatch, features):
    """XLA's CPU takes a matrix out of a stack by copying it, and one of bfloat16 by converting the stack to float32."""
    monkeypatch.setattr(native, "has_feature", features.__contains__)
    for num, dtype in ((40, "float32"), (40, "bfloat16"), (200, "bfloat16")):
        x, experts, weights = tokens(num, False, num)  # of 200, most are past their experts' slots
        stacks = matrices(dtype)
        program = jax.jit(groups).lower(jnp.asarray(x, dtype), experts, weights, stacks).compile()
        made = [line.split(" = ")[1] for line in (program.as_text() or "").splitlines() if " = " in line]
        for stack in stacks[:2]:
            dims = ",".join(map(str, stack.shape))
            shapes = [text for text in made if text.split("{")[0].split("[")[-1].rstrip("]") == dims]
            assert shapes and all(" parameter(" in text or " get-tuple-element(" in text for text in shapes), shapes
