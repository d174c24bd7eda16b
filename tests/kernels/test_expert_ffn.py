"""Every form of the experts' sum against a plain loop over tokens and their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import Apart, Matrices, apart_pays, expert_ffn
from pallas_kernels.expert_ffn.slots import slots_of_expert
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


def apart(stacks: Matrices) -> Apart:
    return Apart(tuple(stacks.w13), tuple(stacks.w2))


FORMS = pytest.mark.parametrize(
    ("target", "form"),
    [(CPU, lambda m: m), (CPU, apart), (Target("gpu"), lambda m: m)],
    ids=["slots", "apart", "tiles"],
)


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize(("num", "used"), [(1, 1), (2, 2), (5, 3), (8, 8), (40, 33), (200, 200), (16, 0)])
@FORMS
def test_every_form_is_the_loop(num, used, even, target, form):
    x, experts, weights = tokens(num, even, used)

    @jax.jit
    def run(x, experts, weights, stacks):
        return expert_ffn(x, experts, weights, form(stacks), E, limit=LIMIT, target=target)

    got = run(x, experts, weights, matrices())
    np.testing.assert_allclose(got, loop(x, experts, weights, matrices()), atol=1e-5)
    assert not np.any(got[used:])


@pytest.mark.parametrize("num", [1, 2, 40])
@FORMS
def test_bfloat16_is_accumulated_in_float32(num, target, form):
    x, experts, weights = tokens(num, True, num)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    stacks = matrices("bfloat16")
    run = jax.jit(lambda x, stacks: expert_ffn(x, experts, weights, form(stacks), E, limit=LIMIT, target=target))
    got = run(jnp.asarray(x, jnp.bfloat16), stacks)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, loop(x, experts, weights, stacks), atol=0.02)  # hidden is rounded to 8 bits


def test_what_is_not_a_number_stays_with_its_token():
    x, experts, weights = tokens(40, False, 40)  # most tokens are past their experts' slots
    x[[0, 7]] = np.nan
    for form in (lambda m: m, apart):
        got = np.asarray(
            jax.jit(lambda x, m, form=form: expert_ffn(x, experts, weights, form(m), E, limit=LIMIT))(x, matrices())
        )
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


def test_experts_apart_are_for_few_tokens():
    assert apart_pays(E // 2, E)
    assert not apart_pays(E // 2 + 1, E)


def test_taking_an_expert_does_not_widen_all():
    """XLA's CPU slices bfloat16 by converting the whole stack to float32, in the branch for tokens without a slot."""
    x, experts, weights = tokens(40, False, 40)
    stacks = matrices("bfloat16")
    program = jax.jit(lambda x, m: expert_ffn(x, experts, weights, m, E, limit=LIMIT))
    text = program.lower(jnp.asarray(x, jnp.bfloat16), stacks).compile().as_text() or ""
    for stack in stacks[:2]:
        dims = ",".join(map(str, stack.shape))
        assert f"bf16[{dims}]" in text and f"f32[{dims}]" not in text
