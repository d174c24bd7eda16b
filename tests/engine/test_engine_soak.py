"""Thousands of random requests: nothing leaks, no answer is another's, the numbers add up (faults 15, 17, 18, 35)."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.request import TokenEvent
from tests.fakes import VOCAB, ByteTokenizer, assert_idle, check_caches, fake_engine, preempt, request

COUNTERS = (
    "num_requests num_finished num_preemptions num_prompt_tokens num_cached_tokens num_generated_tokens num_steps "
    "num_computed_tokens"
).split()


class Traffic:
    """Random arrivals, cancels, expired deadlines and forced preemptions; keeps what each request must answer."""

    def __init__(self, engine, seed: int, num_requests: int):
        self.engine, self.rng, self.left = engine, random.Random(seed), num_requests
        self.prefixes = [[self.rng.randrange(VOCAB) for _ in range(120)] for _ in range(3)]
        self.live: dict[str, tuple[list[int], int, int | None]] = {}  # prompt, max_tokens, stop id
        self.num_open: dict[str, int] = {}  # of n, not ended
        self.answers: dict[tuple[str, int], list[TokenEvent]] = {}
        self.num_streamed = self.num_finished = self.num_cancelled = self.num_expired = self.num_hits = 0
        self.deadline_of: set[str] = set()

    def arrive(self) -> None:
        rng, limit = self.rng, self.engine.runner.spec.max_request_tokens
        max_tokens = rng.choice([1, 2, 5, 12, 30])
        length = rng.choice([rng.randint(1, 60), 8 * rng.randint(1, 6) + rng.randint(-1, 1)])
        length = max(1, min(length, limit - max_tokens))
        shared = rng.choice(self.prefixes)[: rng.randint(0, length)]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(length - len(shared))]
        stop = (prompt[-1] + rng.randint(1, 6)) % VOCAB if rng.random() < 0.3 else None
        name = f"r{rng.randrange(30)}"  # ids come again
        if name in self.live:
            return
        n, expires = rng.choice([1, 1, 1, 1, 3]), rng.random() < 0.05
        self.engine.add(
            request(
                name,
                prompt,
                salt=rng.choice(["", "", "tenant"]),
                n=n,
                max_tokens=max_tokens,
                stop_token_ids=[] if stop is None else [stop],
                deadline_s=time.monotonic() - 1 if expires else None,
                logprobs=rng.choice([None, 2]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                **self.service(),
            )
        )
        self.live[name], self.num_open[name] = (prompt, max_tokens, stop), n
        if expires:
            self.deadline_of.add(name)
        self.left -= 1

    def service(self) -> dict:
        """Priority and tenant of the next request."""
        return {}

    def chaos(self) -> None:
        rng, scheduler = self.rng, self.engine.scheduler
        if self.live and rng.random() < 0.04:
            name = rng.choice(sorted(self.live))
            assert self.engine.cancel(name)
            assert not self.engine.cancel(name)
            self.forget(name)
            self.num_cancelled += 1
        busy = [shard for shard in scheduler.shards if shard.running]
        if busy and rng.random() < 0.03:
            preempt(scheduler, rng.choice(busy).running[-1])
        if rng.random() < 0.002:
            self.engine.reset_prefix_cache()

    def forget(self, name: str) -> None:
        del self.live[name]
        self.deadline_of.discard(name)
        for key in [key for key in self.answers if key[0] == name]:
            del self.answers[key]

    def take(self, event: TokenEvent) -> None:
        prompt, max_tokens, stop = self.live[event.request_id]  # never an event of one that is gone
        answer = self.answers.setdefault((event.request_id, event.index), [])
        assert not answer or not answer[-1].finished
        answer.append(event)
        self.num_streamed += len(event.token_ids)
        if event.finished:
            self.num_finished += 1
            if event.error is not None:
                self.num_expired += 1
                assert event.request_id in self.deadline_of
            else:
                expected = [(prompt[-1] + 1 + i) % VOCAB for i in range(max_tokens)]
                if stop in expected:
                    expected = expected[: expected.index(stop) + 1]
                assert [t for e in answer for t in e.token_ids] == expected
                self.num_hits += event.num_cached_tokens > 0
                assert len(answer) == event.num_output_tokens == len(expected)
            self.num_open[event.request_id] -= 1
            if not self.num_open[event.request_id]:
                self.forget(event.request_id)

    def requests(self):
        return (*self.engine.scheduler.waiting, *self.engine.scheduler.running)

    def run(self, per_step: float) -> None:
        before = self.engine.stats()
        num_steps = 0
        while self.left > 0 or self.engine.has_work():
            num_steps += 1
            assert num_steps < 20_000, "no progress"
            while self.left > 0 and self.rng.random() < per_step:
                self.arrive()
            if self.left > 0:
                self.chaos()
            for event in self.step():
                self.take(event)
            check_caches(self.engine)
            before = self.check_stats(before)

    def step(self) -> list[TokenEvent]:
        return self.engine.step()

    def check_stats(self, before):
        stats = self.engine.stats()
        assert 0 <= stats.kv_cache_usage <= 1
        assert stats.num_pages_free >= 0 and stats.num_pages_cached >= 0
        assert stats.num_pages_free + stats.num_pages_cached <= stats.num_pages_total
        assert all(0 <= num <= self.engine.config.scheduler.max_num_seqs for num in stats.num_running_per_shard)
        assert stats.num_running == sum(stats.num_running_per_shard)
        assert stats.num_waiting + stats.num_running == len({r.request_id for r in self.requests()})
        assert stats.num_requests - stats.num_finished == stats.num_waiting + stats.num_running
        assert {r.parent_id for r in self.requests()} == set(self.live)
        assert stats.num_generated_tokens == self.num_streamed
        for name in COUNTERS:
            assert getattr(stats, name) >= getattr(before, name), name
        return dataclasses.replace(stats)


POOLS = {
    "roomy": {},
    "few compressed pages": {"num_pages": {EntryKind.CSA: 5, EntryKind.HCA: 12}},
    "few window pages": {"num_pages": {EntryKind.WINDOW: 12}, "max_num_batched_tokens": 16},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"cache": {"enable_prefix_caching": False}, "num_pages": {EntryKind.CSA: 5}},
    "chunks of one": {"max_num_batched_tokens": 4, "num_pages": {EntryKind.CSA: 5}},
    "two shards": {"num_shards": 2, "num_pages": {EntryKind.CSA: 5, EntryKind.HCA: 12}},
    "four small shards": {
        "num_shards": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "num_pages": {EntryKind.CSA: 4},
    },
    "two shards without chunks": {"num_shards": 2, "enable_chunked_prefill": False, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("name", POOLS)
def test_random_traffic(name):
    engine = fake_engine(tokenizer=ByteTokenizer(), **POOLS[name])
    traffic = Traffic(engine, seed=7, num_requests=340)
    traffic.run(per_step={"one at a time": 0.1, "two shards": 0.45, "four small shards": 0.5}.get(name, 0.3))
    assert traffic.num_finished > 250 and traffic.num_cancelled > 10 and traffic.num_expired > 5
    assert traffic.num_hits > 20 or name == "no prefix cache"
    assert engine.stats().num_preemptions > 5
    assert not traffic.live and engine._live == engine._by_request == {} and engine._deadlines == 0
    shards = {row.shard for step in engine.runner.sent for row in step}
    assert shards == set(range(engine.runner.num_shards))
    assert_idle(engine)
    engine.reset_prefix_cache()
    stats = engine.stats()
    assert (stats.num_pages_free, stats.num_pages_cached) == (stats.num_pages_total, 0)
    assert all(cache.prefix.num_nodes == cache.prefix.num_snapshots == 0 for cache in engine.caches)
