"""The paged step with quantised entries: as the whole-sequence forward whose entries are rounded alike, in every mode.

Entries computed in another order differ in their last bits, and now and then one falls on the other side of a rounding
boundary: so most logits agree as in float32, and the others by far less than rounding itself changes them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsjax import checkpoint
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.config import EngineConfig, ModelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.model.attention import Attention
from dsjax.model.build import assemble
from dsjax.model.compressor import Compressor
from dsjax.verify import Golden, read_golden, recording_runner, verify_mode
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.pool import decode, encode, in_key_basis
from tests.fakes import assert_idle, preempt, request
from tests.golden_sets import sets

MEDIAN, WORST = 3e-3, 0.1  # of a position's largest logit difference; logits are of order 10
MODES = ("paged", "chunk=7", "token")
FOLDER = next(f for f in sets() if f.name == "g4_mixed")
LONGEST = 160  # tokens of a prompt that is taken: half the programs of the longest


@dataclasses.dataclass(kw_only=True)
class Distances(Golden):
    """A prompt that keeps the largest difference of each position."""

    largest: list[float] = dataclasses.field(default_factory=list)

    def compare(self, position, got, draft=None) -> None:
        want = self.expected(position)
        if want is not None:
            self.largest.append(float(np.max(np.abs(got - want))))


def _rounded(x, form: EntryFormat):
    values, side = encode(x, form)
    out = values.astype(x.dtype) if side is None else decode(values, side, form, x.dtype)
    return in_key_basis(out, form)  # the Hadamard matrix is its own inverse


def _prompts(spec: CacheSpec, monkeypatch) -> list[Distances]:
    """The golden prompts with the logits of the whole-sequence forward, entries rounded as the runner's pools do."""
    config = ModelConfig.from_dir(FOLDER)
    latent, key = spec.kinds[EntryKind.WINDOW].format, spec.kinds[EntryKind.INDEX_KEY].format
    project, entries = Attention.project, Compressor.full

    def rounded_project(self, x, table):
        c_q, q, kv = project(self, x, table)
        return c_q, q, _rounded(kv, latent)

    monkeypatch.setattr(Attention, "project", rounded_project)
    monkeypatch.setattr(
        Compressor,
        "full",
        lambda self, x: _rounded(entries(self, x), latent if self.width == config.head_dim else key),
    )
    params = checkpoint.load_params(FOLDER, config, include_mtp=False)
    graph, state = assemble(config, params, np.dtype("float32"), with_mtp=False)
    forward = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
    prompts = []
    for golden in _golden():
        # Causal, so padding at the end changes nothing before it: one length to compile.
        padded = np.pad(golden.ids, (0, LONGEST - len(golden.ids)))
        logits = np.asarray(forward(state, jnp.asarray(padded)))[: len(golden.ids)]
        fields = {"logits": logits, "greedy_ids": logits[-1:].argmax(-1), "greedy_logits": logits[-1:]}
        prompts.append(Distances(index=golden.index, ids=golden.ids, mtp_logits=None, **fields))
        # What rounding itself changes, of which the engine's distance from the rounded forward is a small part.
        assert np.median(np.abs(logits - golden.logits).max(-1)) > 50 * MEDIAN
    return prompts


def _golden() -> list[Golden]:
    return [p for p in read_golden(FOLDER) if len(p.ids) <= LONGEST]


def _check(prompt: Distances) -> None:
    assert np.isfinite(prompt.largest).all()
    assert np.median(prompt.largest) <= MEDIAN and max(prompt.largest) <= WORST
    prompt.largest.clear()


@pytest.mark.parametrize(
    "form", [pytest.param("int8", marks=pytest.mark.matrix), pytest.param("fp8_fp4", marks=pytest.mark.slow)]
)
def test_every_mode_is_the_rounded_forward(form, monkeypatch):
    """Whole prompts, chunks, single tokens; then prefix hits, and a preemption in the middle of a prompt."""
    config = ModelConfig.from_dir(FOLDER)
    runner, max_model_len = recording_runner(
        FOLDER,
        config,
        LONGEST,
        kv_cache_dtype=form,
        cache={"enable_prefix_caching": True, "prefix_unit_tokens": 8, "num_snapshots": 64},
    )
    with monkeypatch.context() as patch:
        prompts = _prompts(runner.spec, patch)
    for mode in MODES:
        assert all(r.greedy_equal for r in verify_mode(mode, runner, config, max_model_len, prompts))
        for prompt in prompts:
            assert len(prompt.largest) == len(prompt.ids)
            _check(prompt)

    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    engine = Engine(
        config=EngineConfig(model="golden", scheduler=scheduler),
        model_config=config,
        runner=runner,  # type: ignore[arg-type]
        tokenizer=None,
        max_model_len=max_model_len,
    )
    for again in (False, True):
        runner.prompts = {f"{p.index}-{again}": dataclasses.replace(p, largest=[], greedy=[]) for p in prompts}
        for name, p in runner.prompts.items():
            engine.add(request(name, p.ids.tolist(), max_tokens=1, ignore_eos=True))
        events = engine.step()
        if not again:
            preempt(engine.scheduler, engine.scheduler.running[0])
        while engine.has_work():
            events += engine.step()
        last = {event.request_id: event for event in events}
        for name, p in runner.prompts.items():
            assert list(last[name].token_ids) == p.greedy_ids.tolist()
            assert (last[name].num_cached_tokens > 0) == again
            assert len(p.largest) < 8 + len(p.ids) % 8 if again else len(p.largest) >= len(p.ids)
            _check(p)
    assert engine.stats().num_preemptions == 1
    assert_idle(engine)
