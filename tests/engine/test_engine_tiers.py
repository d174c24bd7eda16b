"""What left the device and came back is what was there: answers through host memory and disk equal the solo run.

On a real model with NaN-filled pools; faults 6, 9 and 13 of other engines.
"""

from __future__ import annotations

import shutil

import pytest

from dsjax.cache.disk import Disk
from dsjax.cache.tiers import Tiers
from dsjax.errors import ErrorCode, RequestError
from dsjax.scheduler.scheduler import MAX_LOAD_WAIT_S
from tests.cache.inline import Inline
from tests.fakes import assert_idle, drain, find_running, preempt, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_engine

NUM_OUTPUT = 6
FEW = {"num_snapshots": 2}


def answer(engine, prompt, num_output=NUM_OUTPUT, **params):
    """(tokens, cached tokens) of one more request."""
    engine.add(request("one", prompt, max_tokens=num_output, **params))
    events = drain(engine)["one"]
    return tokens_of(events), events[-1].num_cached_tokens


def flood(engine, seed=100):
    """Other traffic on every data shard, after which no snapshot of before is on a device."""
    for i in range(len(engine.caches)):
        engine.add(request(f"flood-{i}", random_prompt(seed + 1000 * i, 17), max_tokens=1))
    drain(engine)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 31, 65])
def test_through_host_memory(length):
    engine, prompt = tiny_engine(cache=FEW, tiers=Tiers(1 << 24)), random_prompt(5, length)
    want = solo(prompt, NUM_OUTPUT)
    assert answer(engine, prompt) == (want, 0)
    flood(engine)
    hits = engine.stats().num_tier_hits
    cached = (length - 1) // 8 * 8
    assert answer(engine, prompt) == (want, cached)
    turn = [*prompt, *want, 5, 6]
    flood(engine, 101)
    assert answer(engine, turn) == (solo(turn, NUM_OUTPUT), length + NUM_OUTPUT - 1)
    stats = engine.stats()
    assert stats.num_tier_hits - hits == 1 + (cached > 0)
    assert stats.num_tier_cached_tokens == cached + length + NUM_OUTPUT - 1
    assert_idle(engine)


def test_salts_keep_tenants_apart_below_the_device():
    engine, prompt = tiny_engine(cache=FEW, tiers=Tiers(1 << 24)), random_prompt(5, 24)
    want = solo(prompt, NUM_OUTPUT)
    for salt, cached in (("s1", 0), ("s2", 0), ("s1", 16), ("", 0), ("s2", 16)):
        assert answer(engine, prompt, salt=salt) == (want, cached)
        flood(engine, 100 + len(salt) + cached)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_at_each_of_16_successive_steps(mode):
    """16 steps are every phase of both compressors; with a token in flight, and traffic that takes the snapshots."""
    victim, want = random_prompt(7, 13), solo(random_prompt(7, 13), 20)
    engine = tiny_engine(max_num_seqs=2, cache={"num_snapshots": 1}, tiers=Tiers(1 << 24), preemption_mode=mode)
    for step in range(16):
        engine.add(request("victim", victim, max_tokens=20, salt=str(step)))
        tokens, computed = [], engine.stats().num_computed_tokens
        while engine.has_work():
            running = find_running(engine, "victim")
            if running and len(tokens) == step and running.num_preemptions == 0:
                preempt(engine.scheduler, running)
                engine.add(request("other", random_prompt(20 + step, 17), max_tokens=2, priority=-1))
                engine.scheduler.waiting.remove(running)
                while engine.has_work():
                    tokens += tokens_of([e for e in engine.step() if e.request_id == "victim"])
                engine.scheduler.waiting.add(running)
            tokens += tokens_of([e for e in engine.step() if e.request_id == "victim"])
        assert tokens == want, step
        again = engine.stats().num_computed_tokens - computed - (13 + 19) - (17 + 1)
        assert again == 0 if mode == "swap" else again >= step % 8
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (16, 16 if mode == "swap" else 0)
    assert_idle(engine)


def disk_engine(folder, fingerprint="model", host_bytes=1 << 24, disk_bytes=1 << 26, **options):
    disk = Disk(folder, disk_bytes, fingerprint, Inline(), Inline())
    return tiny_engine(cache=FEW, tiers=Tiers(host_bytes, disk), **options)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_restart_finds_what_was_cached(tmp_path, dtype):
    prompts = [random_prompt(i, 20 + i) for i in range(3)]
    first = disk_engine(tmp_path, host_cache_dtype=dtype)
    want = [answer(first, prompt)[0] for prompt in prompts]
    assert want == [solo(prompt, NUM_OUTPUT) for prompt in prompts]
    first.close()
    second = disk_engine(tmp_path, host_cache_dtype=dtype)
    assert second.stats().disk_cache_bytes_used == sum(path.stat().st_size for path in tmp_path.iterdir())
    for prompt, tokens in zip(prompts, want, strict=True):
        turn = [*prompt, *tokens, 5, 6]
        got, cached = answer(second, turn)
        assert cached == len(prompt) + NUM_OUTPUT - 1
        if dtype == "auto":  # rounding may change an answer
            assert got == solo(turn, NUM_OUTPUT)
    stats = second.stats()
    assert (stats.num_tier_hits, stats.num_tier_loads, stats.num_tier_damaged, stats.num_tier_foreign) == (3, 3, 0, 0)
    assert_idle(second)


def test_another_model_finds_nothing(tmp_path):
    prompt = random_prompt(5, 24)
    first = disk_engine(tmp_path)
    answer(first, prompt)
    first.close()
    files = sorted(tmp_path.iterdir())
    second = disk_engine(tmp_path, "another")
    assert answer(second, prompt) == (solo(prompt, NUM_OUTPUT), 0)
    stats = second.stats()
    assert (stats.num_tier_foreign, stats.num_tier_damaged, stats.num_tier_hits) == (len(files), 0, 0)
    assert set(files) <= set(tmp_path.iterdir())


@pytest.mark.parametrize("harm", ["flipped", "truncated", "lost"])
def test_damage_is_never_served(tmp_path, harm):
    """Every file in turn."""
    prompt = random_prompt(5, 17)
    want = solo(prompt, NUM_OUTPUT)
    first = disk_engine(tmp_path / "first")
    answer(first, prompt)
    first.close()
    for number, name in enumerate(sorted(path.name for path in (tmp_path / "first").iterdir())):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        data = bytearray((folder / name).read_bytes())
        if harm == "flipped":
            data[-1] ^= 1
        (folder / name).write_bytes(data[:-1] if harm == "truncated" else data)
        if harm == "lost":
            (folder / name).unlink()
        second = disk_engine(folder)
        tokens, cached = answer(second, prompt)
        assert tokens == want and cached in (0, 8, 16)
        if harm != "flipped":
            assert second.stats().num_tier_damaged == (harm == "truncated")
        second.close()
    assert number > 10


def test_a_session_is_prefetched(tmp_path):
    engine, prompt = disk_engine(tmp_path), random_prompt(5, 20)
    tokens, _ = answer(engine, prompt, session_id="s")
    flood(engine)
    turn = [*prompt, *tokens, 5, 6]
    assert not engine.prefetch(session_id="another") and not engine.prefetch(session_id="s", cache_salt="another")
    assert engine.stats().num_tier_hits == 0
    assert engine.prefetch(session_id="s") and not engine.prefetch(session_id="s")
    assert engine.stats().num_tier_hits == 1
    assert answer(engine, turn) == (solo(turn, NUM_OUTPUT), 25)
    assert engine.stats().num_tier_hits == 1
    flood(engine, 101)
    assert engine.prefetch(token_ids=random_prompt(100, 17))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        ({}, "the prompt is empty"),
        ({"token_ids": [], "cache_salt": "s"}, "the prompt is empty"),
        ({"token_ids": [1, 1 << 20]}, "prompt token 1048576 is not a token"),
        ({"token_ids": [1] * 4096}, "the prompt has 4096 tokens"),
    ],
)
def test_a_hint_that_no_request_may_begin_with_is_refused(hint, message):
    with pytest.raises(RequestError, match=message) as caught:
        tiny_engine().prefetch(**hint)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_reset_forgets_all_tiers(tmp_path):
    engine, prompt = disk_engine(tmp_path), random_prompt(5, 24)
    want, _ = answer(engine, prompt)
    flood(engine)
    engine.reset_prefix_cache()
    assert answer(engine, prompt) == (want, 0)
    engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats.host_cache_bytes_used, stats.disk_cache_bytes_used, list(tmp_path.iterdir())) == (0, 0, [])


def test_a_request_waits_for_its_file_but_not_for_ever(tmp_path):
    prompt = random_prompt(5, 24)
    want = solo(prompt, NUM_OUTPUT)
    first = disk_engine(tmp_path)
    answer(first, prompt)
    first.close()
    for arrives in (True, False):
        now, reader = [0.0], Inline(held=True)
        engine = tiny_engine(cache=FEW, tiers=Tiers(1 << 24, Disk(tmp_path, 1 << 26, "model", reader, Inline())))
        engine.clock = lambda now=now: now[0]
        engine.add(request("one", prompt, max_tokens=NUM_OUTPUT))
        engine.add(request("other", random_prompt(6 + arrives, 9), max_tokens=2))
        names = [event.request_id for _ in range(4) for event in engine.step()]
        assert names == ["other"] * 2  # who comes later passes
        assert [r.parent_id for r in engine.scheduler.waiting] == ["one"] and engine.step() == []
        assert engine.wake_s() == pytest.approx(0.002)
        now[0] = MAX_LOAD_WAIT_S - 0.01
        assert engine.step() == [] and engine.scheduler.num_running == 0
        if arrives:
            reader.release()
        else:
            now[0] = MAX_LOAD_WAIT_S
        events = drain(engine)["one"]
        assert (tokens_of(events), events[-1].num_cached_tokens) == (want, 16 if arrives else 0)
        assert engine.wake_s() is None
        engine.close()


def test_closing_ends_where_nothing_can_be_kept(tmp_path):
    engine = disk_engine(tmp_path, host_bytes=1, disk_bytes=1)
    answer(engine, random_prompt(5, 24))
    engine.close()
    assert list(tmp_path.iterdir()) == [] and engine.stats().host_cache_bytes_used == 0
