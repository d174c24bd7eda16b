"""Compiled programs on disk: what finds them, what does not, and what becomes of files that are no good."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import pickle
import zlib

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from dsjax.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.load import make_runner
from dsjax.runner import program_cache
from dsjax.runner.compiles import COMPILES
from dsjax.runner.program_cache import ProgramCache
from dsjax.runner.runner import SET_SLOT, Runner
from tests.fakes import SMALL_CACHE, drain, request
from tests.tiny_model import random_prompt, tiny_config, tiny_params

pytestmark = pytest.mark.usefixtures("compiled_anew")
X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def program() -> jax.stages.Compiled:
    return jax.jit(lambda x: {"twice": 2 * x, "sum": (x.sum(), None)}).lower(X).compile()


def cache_in(folder, facts=("a model",), **options) -> ProgramCache:
    return ProgramCache(folder, jax.devices()[:1], facts, **options)


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_what_was_saved_is_loaded_and_computes_the_same(tmp_path, program):
    first = cache_in(tmp_path / "new")
    path = first.path(["a step"])
    assert first.load(path) is None
    first.save(path, program)
    second = cache_in(tmp_path / "new")  # another server
    assert second.path(["a step"]) == path
    loaded = second.load(path)
    assert loaded is not None
    jax.tree.map(np.testing.assert_array_equal, loaded(X), program(X))
    assert (first.num_loaded, second.num_loaded, second.num_damaged) == (0, 1, 0)
    assert names(tmp_path / "new") == {path.name}  # nothing half written is left


def test_a_program_of_one_device_of_several_is_loaded_for_that_device(tmp_path):
    device = jax.devices()[-1]
    compiled = jax.jit(lambda x: x + 1).lower(jax.device_put(X, device)).compile()
    cache = ProgramCache(tmp_path, [device], [])
    cache.save(cache.path([]), compiled)
    loaded = cache.load(cache.path([]))
    assert loaded is not None
    out = loaded(jax.device_put(X, device))
    assert out.devices() == {device}
    assert cache.path([]) != cache_in(tmp_path, []).path([])


def change_nothing(monkeypatch):
    pass


def change_sources(monkeypatch):
    monkeypatch.setattr(program_cache, "_hash_of_sources", lambda: "other code")


def change_versions(monkeypatch):
    of = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "jaxlib" else of(name))


def change_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")


def change_cpu(monkeypatch):
    monkeypatch.setattr(program_cache, "_cpu_model", lambda: ("flags: sse",))


def change_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (change_nothing, True),
        (change_sources, False),
        (change_versions, False),
        (change_flags, False),
        (change_cpu, False),
        (change_cores, False),
    ],
)
def test_another_code_version_or_machine_does_not_find_it(tmp_path, monkeypatch, change, same):
    before = cache_in(tmp_path).path(["a step"])
    change(monkeypatch)
    assert (cache_in(tmp_path).path(["a step"]) == before) is same


def test_another_setting_of_jax_does_not_find_it_but_where_its_cache_is_does_not_matter(tmp_path):
    before = cache_in(tmp_path).path([])
    old = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert cache_in(tmp_path).path([]) == before
    finally:
        jax.config.update("jax_compilation_cache_dir", old)
    jax.config.update("jax_debug_nans", True)
    try:
        assert cache_in(tmp_path).path([]) != before
    finally:
        jax.config.update("jax_debug_nans", False)


def with_checksum(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest() + packed


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "checksum"),
        (lambda data: data[:20], "checksum"),
        (lambda data: data[: len(data) // 2], "checksum"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: with_checksum(b"not compressed"), "header"),
        (lambda data: with_checksum(zlib.compress(b"not pickled")), ""),
        (lambda data: with_checksum(zlib.compress(pickle.dumps((b"no program", None, None)))), ""),
    ],
    ids=["empty", "head only", "half", "a bit", "not compressed", "not pickled", "no program"],
)
def test_a_damaged_file_is_told_skipped_and_replaced(tmp_path, caplog, program, damage, says):
    cache = cache_in(tmp_path)
    path = cache.path([])
    cache.save(path, program)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="dsjax"):
        assert cache.load(path) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage() and says in record.getMessage()
    assert (cache.num_loaded, cache.num_damaged) == (0, 1)
    cache.save(path, program)
    assert cache.load(path) is not None


def test_what_cannot_be_serialised_or_written_is_told_and_leaves_nothing(tmp_path, caplog, monkeypatch, program):
    cache = cache_in(tmp_path / "programs")

    def refuse(*_):
        raise OSError("no room")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="dsjax"):
        patched.setattr(os, "replace", refuse)
        cache.save(cache.path([]), program)
        assert "no room" in caplog.text
        assert names(tmp_path / "programs") == set()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="dsjax"):
        patched.setattr(serialize_executable, "serialize", refuse)
        cache.save(cache.path([]), program)
    assert len(caplog.records) == 2
    (tmp_path / "file").write_text("")
    unusable = cache_in(tmp_path / "file")
    assert unusable.load(unusable.path([])) is None
    unusable.save(unusable.path([]), program)
    assert len(caplog.records) == 3
    unusable.trim()


def test_the_least_recently_used_and_the_abandoned_are_deleted(tmp_path, program):
    cache = cache_in(tmp_path)
    paths = [cache.path([i]) for i in range(4)]
    for i, path in enumerate(paths):
        cache.save(path, program)
        os.utime(path, (i, i))
    (tmp_path / "young.part").write_bytes(b"being written")
    (tmp_path / "old.part").write_bytes(b"abandoned")
    (tmp_path / "notes.txt").write_text("not ours")
    for name in ("old.part", "notes.txt"):
        os.utime(tmp_path / name, (0, 0))
    assert cache.load(paths[0]) is not None  # used now
    size = max(path.stat().st_size for path in paths)
    cache_in(tmp_path, max_bytes=2 * size).trim()
    assert names(tmp_path) == {paths[0].name, paths[3].name, "young.part", "notes.txt"}


# --- a runner's -------------------------------------------------------------------------------------


def runner_in(folder, **changes) -> Runner:
    """Of the tiny model, with the fewest shapes; `changes` are fields of any of the configs, or of `make_runner`."""

    def of(kind: type, **fields):
        mine = {f.name for f in dataclasses.fields(kind)} & changes.keys()
        return {**fields, **{name: changes.pop(name) for name in mine}}

    model = dataclasses.replace(tiny_config(), **of(ModelConfig))
    cache = CacheConfig(**of(CacheConfig, **SMALL_CACHE))
    scheduler = SchedulerConfig(**of(SchedulerConfig, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64))
    options = {"read": lambda *_: tiny_params(), "parallel": ParallelConfig(), **changes}
    return make_runner(model, cache=cache, scheduler=scheduler, program_dir=folder, **options)[0]


def answer(runner: Runner) -> list[tuple]:
    """Tokens and logprobs of a request whose prompt takes two chunks."""
    config = EngineConfig(model="tiny", cache=CacheConfig(**SMALL_CACHE), scheduler=SchedulerConfig(max_num_seqs=1))
    engine = Engine(config=config, model_config=tiny_config(), runner=runner, tokenizer=None, max_model_len=64)
    engine.add(request("r", random_prompt(0, 20), max_tokens=12, logprobs=1))
    return [(event.token_ids, event.logprobs) for event in drain(engine)["r"]]


def test_a_second_start_traces_and_compiles_nothing_and_answers_the_same(tmp_path, monkeypatch):
    first = runner_in(tmp_path)
    first.warm_up()
    assert len(names(tmp_path)) == len(first._programs) == 5
    expected = answer(first)

    def refuse(runner, key):
        raise AssertionError(f"{key} is lowered")

    monkeypatch.setattr(Runner, "lower", refuse)
    second, before = runner_in(tmp_path), COMPILES.total
    second.warm_up()
    assert COMPILES.total == before
    pools = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(second.cache)]
    assert answer(second) == expected
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(second.cache)] == pools  # updated in place
    assert COMPILES.after_warm_up == 0


@pytest.mark.parametrize(
    ("key", "change", "same"),
    [
        ("step", {}, True),
        ("step", {"rms_norm_eps": 1e-5}, False),
        ("step", {"num_gpu_blocks_override": 7}, False),
        ("step", {"max_model_len": 128}, False),
        ("step", {"dtype": "bfloat16"}, False),
        ("step", {"all_logits": True}, False),
        ("step", {"scanned": True}, True),  # a layer of each kind: nothing repeats
        ("step", {"max_num_seqs": 2}, False),
        ("copy", {}, True),
        ("copy", {"num_gpu_blocks_override": 7}, False),
        ("slot", {}, True),
        ("slot", {"max_num_seqs": 2}, False),
    ],
)
def test_another_model_or_layout_does_not_find_it(tmp_path, key, change, same):
    def path(runner: Runner):
        keys = {"step": runner.buckets.mixed[-1], "copy": runner.copy_sizes[0], "slot": SET_SLOT}
        assert runner._kept is not None
        return runner._path(runner._kept, keys[key])

    assert (path(runner_in(tmp_path, read=None, **change)) == path(runner_in(tmp_path, read=None))) is same


def test_programs_have_files_of_their_own(tmp_path):
    runner = runner_in(tmp_path, read=None, max_num_batched_tokens=64, max_num_seqs=32, host_cache_dtype="auto")
    assert runner._kept is not None and runner.transfers is not None
    keys = [*runner.buckets, *runner.copy_sizes, SET_SLOT, *runner.transfers.programs]
    assert len({runner._path(runner._kept, key) for key in keys}) == len(keys)


def test_what_jax_had_in_its_own_cache_is_not_written(tmp_path):
    """XLA's CPU writes such a program without some of its functions: it could be loaded, and not run."""
    runner = runner_in(tmp_path / "ours", read=None)
    jax.config.update("jax_enable_compilation_cache", True)
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    try:
        for key in ("compiled", "loaded"):
            runner._compile(key, jax.jit(lambda x: 3 * x).lower(X))
            jax.clear_caches()
    finally:
        jax.config.update("jax_enable_compilation_cache", False)
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert runner._kept is not None
    assert names(tmp_path / "ours") == {runner._path(runner._kept, "compiled").name}
