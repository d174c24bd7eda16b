"""Thousands of random operations against a model of the device: faults 6, 13, 15 and 21 of other engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import CacheManager
from dsjax.cache.spec import CacheSpec
from dsjax.cache.tiers import Tiers
from dsjax.config import LayerKind
from tests.cache.device_model import DeviceModel, prefix_names
from tests.cache.specs import cache_spec


@dataclass(eq=False)
class Sequence:
    request_id: str
    salt: str
    tokens: list[int]
    num_output: int
    uses_cache: bool
    num_computed: int = 0
    num_prefill: int = 0
    names: list[int] = field(default_factory=list)


class World:
    """A careless scheduler: it does in any order whatever a real one might do."""

    def __init__(self, spec: CacheSpec, seed: int, tiers: Tiers | None = None, tenant_tokens: dict | None = None):
        self.rng = random.Random(seed)
        self.tiers, self.on_the_way = tiers, []
        self.manager = CacheManager(spec, tiers, tenant_tokens)
        self.device = DeviceModel(self.manager)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prefixes = [[self.rng.randrange(3) for _ in range(200)] for _ in range(3)]
        self.num_ops = self.num_hits = self.num_preempted = self.num_started = self.num_branches = 0

    def op(self) -> None:
        self.num_ops += 1
        self.manager.check()
        if self.tiers is not None:
            self.tiers.check()

    def arrive(self) -> None:
        rng, limit = self.rng, min(self.manager.spec.max_request_tokens, 180)
        num_output = rng.choice([1, 2, 5, 12])
        length = rng.choice([rng.randint(1, limit), 8 * rng.randint(1, 8) + rng.randint(-1, 1)])
        length = max(1, min(length, limit - num_output))
        prefix = rng.choice(self.prefixes)[: rng.randint(0, length)]
        tokens = prefix + [rng.randrange(3) for _ in range(rng.choice([0, length - len(prefix)]))]
        salt = rng.choice(["", "", "tenant"])
        self.num_started += 1
        sequence = Sequence(f"r{self.num_started}", salt, tokens or [0], num_output, rng.random() < 0.9)
        self.waiting.append(sequence)

    def stop(self, sequence: Sequence, *, finished: bool = False) -> None:
        known = sequence.tokens[: sequence.num_computed]
        choice = self.rng.randrange(3)
        if choice == 0 and not finished:
            self.manager.release(sequence.request_id)
        else:
            snapshot = finished or choice == 1
            self.manager.release(sequence.request_id, known, sequence.num_computed, snapshot)
        self.running.remove(sequence)
        self.op()

    def preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.stop(sequence)
        self.waiting.insert(0, sequence)

    def admit(self, sequence: Sequence) -> bool:
        manager = self.manager
        before = manager.num_free, manager.num_cached, manager.num_free_slots
        if self.tiers is not None and sequence.uses_cache:
            manager.want(sequence.tokens, UnitHashes(sequence.salt, manager.spec.unit_tokens), 0)
            self.tiers.poll()
        admission = manager.admit(
            sequence.request_id, sequence.tokens, sequence.salt, sequence.uses_cache, 4, tenant=sequence.salt
        )
        self.op()
        if admission is None:
            assert self.tiers or before == (manager.num_free, manager.num_cached, manager.num_free_slots)
            assert sum(before[:2]) == manager.num_free + manager.num_cached and before[2] == manager.num_free_slots
            return False
        assert admission.num_cached <= admission.num_shared < len(sequence.tokens)
        sequence.num_computed = admission.num_cached
        sequence.num_prefill = len(sequence.tokens)
        sequence.names = prefix_names(sequence.salt, sequence.tokens)
        self.num_hits += admission.num_cached > 0
        self.num_branches += admission.num_shared > admission.num_cached
        self.waiting.remove(sequence)
        self.running.append(sequence)
        first = min(4, len(sequence.tokens) - sequence.num_computed)
        assert manager.extend(sequence.request_id, sequence.num_computed + min(first, manager.spec.max_chunk_tokens))
        self.op()
        return True

    def chaos(self) -> None:
        if self.running and self.rng.random() < 0.06:
            self.stop(self.rng.choice(self.running))  # aborted
        if self.running and self.rng.random() < 0.06:
            self.preempt(self.rng.choice(self.running))
        if self.waiting and self.rng.random() < 0.02:
            self.waiting.remove(self.rng.choice(self.waiting))
        while self.waiting and self.rng.random() < 0.7 and self.admit(self.rng.choice(self.waiting)):
            pass

    def step(self, calm: bool = False) -> None:
        manager, budget = self.manager, self.manager.spec.max_chunk_tokens
        if calm:
            while self.waiting and self.admit(self.waiting[0]):
                pass
        else:
            self.chaos()
        plan = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            start = sequence.num_computed
            boundary = manager.next_boundary(sequence.request_id, start, sequence.num_prefill)
            assert boundary > start
            end = min(boundary, len(sequence.tokens), start + self.rng.randint(1, budget))
            while not manager.extend(sequence.request_id, end):
                self.op()
                victim = self.running[-1]
                assert len(self.running) > 1 or victim is sequence
                self.preempt(victim)
                plan = [row for row in plan if row[0] is not victim]
                if victim is sequence:
                    break
            else:
                self.op()
                plan.append((sequence, start, end))
        if not calm and self.rng.random() < 0.2:
            self.chaos()  # after pages were planned, before the step
            plan = [row for row in plan if row[0] in self.running and row[0].num_computed == row[1]]
            plan = [row for row in plan if self.manager.extend(row[0].request_id, row[2])]
        self.on_the_way += self.device.move(manager.take_moves())
        if self.tiers is not None:
            self.tiers.poll()
        while self.tiers and self.on_the_way and self.rng.random() < 0.9:
            self.tiers.put(*self.on_the_way.pop(0))
        self.device.step(manager, [(s.request_id, s.names, start, end) for s, start, end in plan])
        for sequence, _, end in plan:
            sequence.num_computed = end
            num_known = len(sequence.tokens) - (end > sequence.num_prefill and self.rng.random() < 0.5)
            manager.computed(sequence.request_id, sequence.tokens[:num_known], end)
            self.op()
            if end < len(sequence.tokens):
                continue
            sequence.num_output -= 1
            if sequence.num_output <= 0:
                self.stop(sequence, finished=True)
            else:
                sequence.tokens.append(self.rng.randrange(3))
                sequence.names.append(hash((sequence.names[-1], sequence.tokens[-1])))

    def run(self, num_ops: int) -> None:
        while self.num_ops < num_ops:
            while len(self.waiting) < 3:
                self.arrive()
            self.step()
        for _ in range(5000):
            if not (self.waiting or self.running):
                break
            self.step(calm=True)


SPECS = {
    "roomy": cache_spec(),
    "tight": cache_spec(num_blocks=26, num_snapshots=6),
    "one at a time": cache_spec(num_blocks=12, num_snapshots=3),
    "few window pages": cache_spec(num_blocks=4, num_snapshots=4, max_model_len=64),
    "hca window longer than a unit": cache_spec(hca_ratio=128, num_blocks=40),
    "unit shorter than an entry": cache_spec(unit=3, page=4, interval=9, num_blocks=60),
    "pages longer than units": cache_spec(page=64, unit=8, num_blocks=8),
    "window of one": cache_spec(window=1, num_blocks=26),
    "wide window": cache_spec(window=40, num_blocks=40),
    "page of one": cache_spec(page=1, num_blocks=200),
    "sliding only": cache_spec(layer_kinds=(LayerKind.SLIDING,), num_blocks=12),
    "one snapshot": cache_spec(num_blocks=30, num_snapshots=1),
    "no prefix cache": cache_spec(num_blocks=26, prefix=False),
}


@pytest.mark.parametrize("name", SPECS)
def test_random_operations(name):
    world = World(SPECS[name], seed=1)
    world.run(2000)
    manager = world.manager
    assert not world.waiting and not world.running
    assert manager.num_free + manager.num_cached == manager.num_total
    assert manager.usage == 0
    assert manager.num_free_slots == 4
    assert world.num_preempted > 5
    assert (world.num_hits > 0) == (name != "no prefix cache")
    manager.reset_prefix_cache()
    manager.check()
    assert (manager.num_free, manager.num_cached) == (manager.num_total, 0)
    assert manager.prefix.num_nodes == manager.prefix.num_snapshots == 0
