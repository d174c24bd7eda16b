"""Both ways to experts on many devices give what one device gives, however uneven the choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dsjax.axes import DATA, SHARD
from dsjax.config import ParallelConfig
from dsjax.model import exchange
from dsjax.sharding import make_mesh
from dsjax.traffic import collectives
from pallas_kernels import collectives as mesh_collectives

E, K, D = 16, 3, 8  # experts, experts a token, width
WEIGHTS = np.random.default_rng(0).normal(size=(E, D)).astype(np.float32)
MESHES = ["data:8", "data:4,model:2", "data:2,model:4", "model:8", "data:2,model:2"]


def choices(name: str, num_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    if name == "even":
        return np.stack([rng.permutation(E)[:K] for _ in range(num_tokens)])
    if name == "all on one device":
        return np.tile(
            np.arange(K) % 2, (num_tokens, 1)
        )  # experts 0 and 1 are always on one device; K names some twice
    if name == "half of them empty":
        return np.stack([rng.permutation(E // 2)[:K] for _ in range(num_tokens)])
    raise AssertionError(name)


def run(mesh, way, x, experts, weights, used):
    """x [shards * T, D]: each data shard's tokens, of which the first `used` are real."""

    def compute(num_local, x, experts, weights):
        """Expert e multiplies by its row of WEIGHTS."""
        first = mesh_collectives.index(("data", "model", "kv")) * num_local
        table = jnp.concatenate([jnp.asarray(WEIGHTS), jnp.zeros((num_local, D))])
        rows = jnp.where((experts < num_local)[..., None], table[first + experts], 0)
        return jnp.sum(rows * weights[..., None], axis=1) * x

    def shard(x, experts, weights, used):
        experts = jnp.where(jnp.arange(x.shape[0])[:, None] < used[0], experts, E)
        num_local = E // mesh.size
        out = way(x, experts, weights, num_local, functools.partial(compute, num_local))
        return mesh_collectives.psum(out, SHARD)

    by_shard = P(DATA)
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(by_shard,) * 4, out_specs=by_shard, check_vma=False)
    program = jax.jit(mapped).lower(x, experts, weights, used).compile()
    return np.asarray(program(x, experts, weights, used)), collectives(program.as_text())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("choice", ["even", "all on one device", "half of them empty"])
@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_every_token_gets_its_experts(mesh, choice, way):
    mesh = make_mesh(ParallelConfig.of(mesh=mesh))
    shards, num_tokens = mesh.shape[DATA], 64
    rng = np.random.default_rng(2)
    x = rng.normal(size=(shards * num_tokens, D)).astype(np.float32)
    experts = choices(choice, shards * num_tokens).astype(np.int32)
    weights = rng.uniform(size=experts.shape).astype(np.float32)
    used = np.array([0, 64, 1, 33, 64, 7, 0, 64][:shards], np.int32)  # shards with no token at all among them
    got, _ = run(mesh, {"gather": exchange._gather, "all_to_all": exchange._all_to_all}[way], x, experts, weights, used)
    want = np.einsum("tk,tkd->td", weights, WEIGHTS[experts]) * x
    want *= (np.arange(num_tokens) < used[:, None]).reshape(-1, 1)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("mesh", ["data:8", "data:4,model:2", "data:2,model:4"])
@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_the_way_taken_moves_fewer_bytes(mesh, num_tokens):
    """The numbers the choice is made by are those of the compiled text, and it takes the smaller one."""
    mesh = make_mesh(ParallelConfig.of(mesh=mesh))
    shards, shard_size = mesh.shape[DATA], mesh.size // mesh.shape[DATA]
    total = shards * num_tokens
    args = (
        np.zeros((total, D), np.float32),
        np.zeros((total, K), np.int32),
        np.zeros((total, K), np.float32),
        np.zeros(shards, np.int32),
    )
    moved = exchange.rows_moved(num_tokens, shards, shard_size, K)
    row_bytes, choice_bytes = D * 4, 2 * K * 4
    sent = {}
    for name, way in (("gather", exchange._gather), ("all_to_all", exchange._all_to_all)):
        _, found = run(mesh, way, *args)
        of_way = [c for c in found if name in c.scope or "scatter_results" in c.scope]
        sent[name] = sum(c.sent_bytes for c in of_way if c.result_bytes > 4)  # not the number of passes
        assert sent[name] == moved[name] * (2 * row_bytes + choice_bytes), name
    taken = min(moved, key=lambda name: moved[name])
    assert sent[taken] == min(sent.values())


def test_what_is_chosen_for_real_sizes():
    """Flash's 6 experts a token: gather at decode on few devices, all-to-all for chunks, and on many devices always."""

    def way(num_tokens, shards, shard_size):
        moved = exchange.rows_moved(num_tokens, shards, shard_size, 6)
        return min(moved, key=lambda name: moved[name])

    assert way(8, 8, 1) == "gather"
    assert way(2048, 8, 1) == "all_to_all"
    assert way(2048, 2, 4) == "gather"  # four devices share each shard's tokens already
    assert way(2048, 2, 8) == "all_to_all"
    assert way(64, 64, 1) == "all_to_all"
    assert way(17, 2, 4) == "gather"  # 4 devices cannot divide 17 tokens
    assert exchange.capacity(64, 8, 6) == 48 and exchange.capacity(4, 8, 6) == 4
