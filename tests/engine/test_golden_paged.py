"""The paged step against the golden sets: chunks of any size, company, preemption, prefix hits, and inner tensors."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax import checkpoint
from dsjax.cache.manager import CacheManager
from dsjax.cache.spec import CacheSpec
from dsjax.cache.state import CacheState
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.model import paged
from dsjax.model.build import assemble
from dsjax.request import Request, SamplingParams
from dsjax.runner.batch import Layout, pack, unpack
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import SlotParams
from dsjax.scheduler.plan import RowPlan, Rows
from dsjax.sharding import Rules
from dsjax.verify import ALL_MODES, Golden, RecordingRunner, read_golden, recording_runner, verify
from tests.fakes import check_caches, default_parallel, preempt
from tests.golden_sets import sets
from tests.model.test_golden_full import ATOL, compare_inner

QUICK = ("g4_mixed",)  # every kind of layer and hash routing; MTP is among the slow ones, and in test_golden_full
PAGED_MODES = tuple(mode for mode in ALL_MODES if mode not in ("full", "chunk=1"))  # the latter is token


def _marked(folder: Path, *quick: str):
    return pytest.param(folder, id=folder.name, marks=() if folder.name in quick else pytest.mark.slow)


@pytest.mark.parametrize("folder", [_marked(f, *QUICK) for f in sets()])
def test_every_mode(folder):
    results = list(verify(folder, PAGED_MODES))
    assert len(results) == len(PAGED_MODES) * len(read_golden(folder))
    assert [r for r in results if not r.passes(ATOL)] == []


def _parallel(config: ModelConfig) -> ParallelConfig:
    """The engine tests' mesh; with heads that it does not divide, each device has all, and a part of the cache."""
    parallel = default_parallel()
    try:
        Rules.of(config, parallel)
    except ConfigError:
        parallel = dataclasses.replace(parallel, kv_parallel=parallel.tensor_parallel_size)
    return parallel


@functools.cache
def _cached_runner(folder: Path) -> tuple[RecordingRunner, ModelConfig, int]:
    """A recording runner with a prefix cache of 8-token units, shared by the tests of a set."""
    config = ModelConfig.from_dir(folder)
    longest = max(len(p.ids) + len(p.greedy_ids) for p in read_golden(folder))
    runner, max_model_len = recording_runner(
        folder,
        config,
        longest,
        parallel=_parallel(config),
        cache={"enable_prefix_caching": True, "prefix_unit_tokens": 8, "num_snapshots": 256},
    )
    return runner, config, max_model_len


def _engine(folder: Path, prompts: dict[str, Golden], max_num_seqs: int = 4, tokens: int = 64) -> Engine:
    runner, config, max_model_len = _cached_runner(folder)
    runner.prompts = prompts
    return Engine(
        config=EngineConfig(
            model="golden", scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens)
        ),
        model_config=config,
        runner=runner,  # type: ignore[arg-type]
        tokenizer=None,
        max_model_len=max_model_len,
    )


def _request(name: str, prompt: Golden, max_tokens: int | None = None, salt: str = "") -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens or len(prompt.greedy_ids), ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt.ids.tolist(), params=params, cache_salt=salt)


def _collect(engine: Engine, prompts: dict[str, Golden], on_token=lambda name: None) -> dict[str, int]:
    """Runs to the end; returns cached tokens by request."""
    cached = {}
    while engine.has_work():
        for event in engine.step():
            prompts[event.request_id].greedy += event.token_ids
            cached[event.request_id] = event.num_cached_tokens
            on_token(event.request_id)
        check_caches(engine)
    return cached


def _check(prompts: dict[str, Golden]) -> None:
    for name, prompt in prompts.items():
        assert prompt.greedy == prompt.greedy_ids[: len(prompt.greedy)].tolist(), name
        assert prompt.difference <= ATOL, name


@pytest.mark.parametrize("folder", [_marked(f, "g4_mixed") for f in sets() if f.name in ("g4_mixed", "g6_ragged")])
def test_preempted_at_each_of_16_successive_decode_steps(folder):
    """16 steps cover every phase of CSA's windows, with and without a token in flight."""
    for num_tokens in range(1, 17):
        prompts = {str(p.index): p for p in read_golden(folder)[-3:]}
        engine = _engine(folder, prompts)
        for name, prompt in prompts.items():
            engine.add(_request(name, prompt, max_tokens=24))

        def at_token(name: str, engine=engine, prompts=prompts, num_tokens=num_tokens) -> None:
            request = next((r for r in engine.scheduler.running if r.parent_id == name), None)
            if request is not None and len(prompts[name].greedy) == num_tokens:
                preempt(engine.scheduler, request)

        _collect(engine, prompts, at_token)
        assert engine.stats().num_preemptions == len(prompts)
        assert all(len(prompt.greedy) == 24 for prompt in prompts.values())
        _check(prompts)


def _add_all(engine: Engine, prompts: dict[str, Golden], salt: str) -> None:
    for name, prompt in prompts.items():
        engine.add(_request(name, prompt, max_tokens=12, salt=salt))


@pytest.mark.parametrize("folder", [f for f in sets() if f.name in ("g4_mixed", "g6_ragged")], ids=lambda f: f.name)
def test_prefix_hits_give_the_same_logits(folder):
    """Every prompt twice, then its next turn, then for another tenant: hits where they must be, and equal logits."""
    golden = read_golden(folder)[-4:]
    first = {f"first-{p.index}": dataclasses.replace(p, greedy=[]) for p in golden}
    again = {f"again-{p.index}": dataclasses.replace(p, greedy=[]) for p in golden}
    salted = {f"salted-{p.index}": dataclasses.replace(p, greedy=[]) for p in golden}
    prompts = {**first, **again, **salted}
    engine = _engine(folder, prompts)
    for group, salt in ((first, ""), (again, "")):
        _add_all(engine, group, salt)
        cached = _collect(engine, prompts)
        for name, prompt in group.items():
            if group is again:
                assert cached[name] >= (len(prompt.ids) - 1) // 8 * 8, name
            else:
                assert cached[name] == 0, name
    # the next turn: prompt and answer so far are one longer prompt
    turns = {}
    for p in golden:
        answer = p.greedy_ids[:12]
        name = f"turn-{p.index}"
        turns[name] = Golden(
            index=p.index,
            ids=np.concatenate([p.ids, answer]),
            logits=np.concatenate([p.logits, p.greedy_logits[1:13]]),
            greedy_ids=p.greedy_ids[12:],
            greedy_logits=p.greedy_logits[12:],
            mtp_logits=None,
        )
        engine.add(_request(name, turns[name], max_tokens=12))
    prompts.update(turns)
    cached = _collect(engine, prompts)
    assert all(cached[name] >= len(p.ids) - 8 for name, p in turns.items()), cached
    _add_all(engine, salted, "other tenant")
    cached = _collect(engine, prompts)
    assert [cached[name] for name in salted] == [0] * len(salted)
    _check(prompts)


@pytest.mark.parametrize(
    "folder",
    [_marked(f) for f in sets() if (f / "layers.npz").is_file()],
)
def test_inner_tensors(folder):
    """One whole prompt in one packed step, behind rows of another request's tokens: every layer's tensors."""
    config = ModelConfig.from_dir(folder)
    golden, layers = np.load(folder / "golden.npz"), np.load(folder / "layers.npz")
    ids = golden[f"p{int(layers['prompt'])}_ids"].tolist()
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=len(ids) + 16)
    spec = CacheSpec.of(config, CacheConfig(block_size=16), scheduler, len(ids) + 16)
    manager = CacheManager(spec)
    rows = []
    for name, tokens in (("other", ids[:5]), ("prompt", ids)):
        admission = manager.admit(name, tokens, "", False, len(tokens))
        assert admission is not None and manager.extend(name, len(tokens))
        request = Request(request_id=name, prompt_token_ids=tokens, params=SamplingParams())
        rows.append(
            RowPlan(
                request=request,
                cache=manager.request(name),
                start=0,
                num_new=len(tokens),
                samples=True,
                first_of_stay=True,
            )
        )
    layout = Layout(Bucket(len(ids) + 16, 2, 16), spec)
    slots, columns = SlotParams(2), Rows.of(rows)
    slots.begin(columns)
    host = pack(layout, columns, slots)
    params = checkpoint.load_params(folder, config, include_mtp=False)
    graph, state = assemble(config, params, np.dtype("float32"), with_mtp=False)
    cache = CacheState.create(spec, config, fill=float("nan"))
    num_pages = {kind: kind_spec.num_pages for kind, kind_spec in spec.kinds.items()}

    @jax.jit
    def run(state, cache, ints, floats):
        model, taps = nnx.merge(graph, state), {}
        batch, _ = unpack(layout, ints, floats, np.zeros(2, np.int32))
        streams = model.embed.as_streams(batch.token_ids)
        streams, _ = paged.forward(model, batch, streams, cache, num_pages, taps.__setitem__)
        model.logits(streams, taps.__setitem__)
        taps["embed"] = model.embed(batch.token_ids)
        masks = {
            n: v.reshape(-1, v.shape[2])[batch.blocks.packing.place]
            for n, v in taps.items()
            if n.endswith("index_mask")
        }
        return {**taps, **masks}, {kind: pieces.row for kind, pieces in batch.pieces.items()}

    taps, piece_rows = jax.tree.map(np.asarray, run(state, cache, host.ints, host.floats))
    got = {}
    for name, value in taps.items():
        if name.endswith("compressed_kv"):
            kind = paged.ENTRY_KIND[config.layer_kinds[int(name[1 : name.index(".")])]]
            complete = len(ids) // spec.kinds[kind].ratio
            got[name] = value[piece_rows[kind] == 1][:complete]
        else:
            got[name] = value[5 : 5 + len(ids)]
    compare_inner(got, layers, config)
