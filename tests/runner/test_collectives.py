"""What a step sends between devices: exactly what dsjax/sharding.py writes down, layer by layer, and nothing else."""

from __future__ import annotations

import re
from collections import Counter

import jax
import pytest

from dsjax.config import LayerKind, ParallelConfig
from dsjax.runner.buckets import Bucket
from dsjax.traffic import Collective, collectives
from tests.fakes import drain, request
from tests.tiny_model import TinyRunner, new_runner, random_prompt, solo, tiny_config, tiny_engine

SLOW = pytest.mark.slow  # each compiles a program of its own, or all of them
DECODE, MIXED = Bucket(8, 8, 1), Bucket(64, 64, 16)
CONFIG = tiny_config()
D, N, H, V, K = 48, 4, 32, 256, 2  # hidden, heads, head width, vocabulary, top-k
HI, DI = 4, 32  # indexer heads and their width


def layer_traffic(kind: LayerKind, parallel: ParallelConfig, bucket: Bucket) -> Counter:
    """(kind of collective, shape of its result, devices) of one layer, from the table in dsjax/sharding.py."""
    t, shard, kv = bucket.num_tokens, parallel.tensor_parallel_size, parallel.kv_parallel
    blocks, block, out = bucket.num_blocks, bucket.block, Counter()
    over_kv = CONFIG.o_groups % shard == 0  # else heads are split over the model axis alone
    heads = shard if over_kv else shard // kv
    if heads > 1:
        out["all-reduce", (t, D), heads] += 1
    if shard > 1:
        out["all-reduce", (t, D), shard] += 1  # experts
        if kind is LayerKind.CSA:
            out["all-gather", (t, HI, DI), shard] += 1
    if kv > 1:
        asked = N * kv // heads if over_kv else N // heads  # query heads at each part of the cache
        out["all-reduce", (blocks, block, asked, 1), kv] += 1
        if over_kv:
            out["all-gather", (t, asked, H), kv] += 1
            out["reduce-scatter", (blocks, block, asked // kv, H + 1), kv] += 1
        else:
            out["all-reduce", (blocks, block, asked, H + 1), kv] += 1
        if kind is LayerKind.CSA:
            out["all-gather", (blocks, block, K * kv, 2), kv] += 1
    return out


def by_layer(found: list[Collective]) -> dict[str, Counter]:
    out: dict[str, Counter] = {}
    for c in found:
        layer = re.search(r"/(layer\d+)/", c.scope)
        name = layer[1] if layer else "step"
        for _, dims in c.shapes:
            out.setdefault(name, Counter())[c.kind, dims, c.group] += c.times
    return out


def compiled(parallel: ParallelConfig, bucket: Bucket) -> list[Collective]:
    return collectives(new_runner(parallel).lower(bucket).compile().as_text())


@pytest.mark.parametrize(
    ("sizes", "bucket"),
    [
        ({"mesh": "data:2,model:4", "kv_parallel": 2}, DECODE),
        pytest.param({"mesh": "model:2"}, DECODE, marks=SLOW),
        pytest.param({"mesh": "data:2,model:2"}, MIXED, marks=SLOW),
        pytest.param({"mesh": "model:2", "kv_parallel": 2}, DECODE, marks=SLOW),
        pytest.param({"mesh": "model:4", "kv_parallel": 4}, MIXED, marks=SLOW),
    ],
    ids=str,
)
def test_a_layer_sends_what_is_written_down(sizes, bucket):
    parallel = ParallelConfig.of(**sizes)
    shard, shards = parallel.tensor_parallel_size, parallel.data_parallel_size
    found = by_layer([c for c in compiled(parallel, bucket) if not c.conditional])
    for i, kind in enumerate(CONFIG.layer_kinds):
        assert found.pop(f"layer{i}") == layer_traffic(kind, parallel, bucket), kind
    t, r = bucket.num_tokens, bucket.num_rows
    assert found["step"]["all-reduce", (t, D), shard] == 1  # the embedding
    assert found["step"]["all-gather", (r, V), shard] == 1 + (
        r == t
    )  # logits of the rows; these tests want all tokens'
    assert sum(found["step"].values()) == 3 + 2 * (shards > 1)  # and results over the data shards
    assert found.keys() == {"step"}


def test_one_device_sends_nothing():
    assert compiled(ParallelConfig(), DECODE) == []


@pytest.mark.parametrize("sizes", [{"mesh": "data:2"}, {"mesh": "data:2,model:1", "expert_parallel": True}], ids=str)
def test_data_shards_meet_at_the_experts_alone(sizes):
    parallel = ParallelConfig.of(**sizes)
    found = by_layer(compiled(parallel, DECODE))
    want = Counter()
    if parallel.expert_parallel:
        want = Counter({("all-gather", (16, D), 2): 1, ("all-gather", (16, 4), 2): 1, ("reduce-scatter", (8, D), 2): 1})
    for i in range(len(CONFIG.layer_kinds)):
        assert found.pop(f"layer{i}", Counter()) == want
    assert {kind for kind, _, _ in found["step"]} == {"all-gather"}


@SLOW
def test_stages_hand_streams_on_and_nothing_else():
    found = compiled(ParallelConfig.of(mesh="stage:2"), DECODE)
    assert {c.kind for c in found} == {"collective-permute", "all-reduce"}
    (shift,) = [c for c in found if c.kind == "collective-permute"]
    assert shift.shapes == (("f32", (4, 8, D)),)
    assert shift.times in (1, 3)  # a tick each, where XLA says how often its loop runs
    assert all(c.shapes[0][0] == "s32" or c.shapes[0][1][-1] == V for c in found if c.kind == "all-reduce")


@SLOW
def test_after_warm_up_nothing_compiles_and_nothing_moves_unasked(monkeypatch):
    """Only explicit transfers: a step's inputs down, its results up; no array is laid out anew on its way."""
    runner = new_runner(ParallelConfig.of(mesh="data:2,model:2", kv_parallel=2))
    runner.warm_up()
    monkeypatch.setattr("tests.tiny_model.tiny_runner", lambda: runner)
    engine = tiny_engine()
    assert isinstance(engine.runner, TinyRunner)
    prompts = {f"r{i}": random_prompt(i, 5 + 7 * i) for i in range(6)}
    with jax.transfer_guard("disallow"):
        for name, prompt in prompts.items():
            params = {"logprobs": 2} if name == "r1" else {"presence_penalty": 0.5} if name == "r2" else {}
            engine.add(request(name, prompt, max_tokens=6, **params))
        events = drain(engine)
        engine.add(request("again", prompts["r5"], max_tokens=6))  # a prefix hit, with its copies
        events |= drain(engine)
    assert engine.stats().num_compiles_after_warm_up == 0
    assert events["again"][-1].num_cached_tokens > 0
    monkeypatch.undo()
    for name in ("r0", "r3", "r5"):
        assert [t for e in events[name] for t in e.token_ids] == solo(prompts[name], 6)
    shardings = [x.sharding for x in jax.tree.leaves((engine.runner.cache, engine.runner.slots))]
    assert shardings == [x.sharding for x in jax.tree.leaves((runner.cache, runner.slots))]


def test_a_transfer_that_was_not_asked_for_is_noticed():
    import numpy as np

    double = jax.jit(lambda x: x * 2)
    double(np.ones(3))
    with pytest.raises(Exception, match=r"[Dd]isallowed"), jax.transfer_guard("disallow"):
        double(np.ones(3))
