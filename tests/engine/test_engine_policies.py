"""Policies change when a request is served, never what it answers: on a real model, with NaN-filled pools."""

import random
from dataclasses import replace

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.scheduler.control import Control
from dsjax.scheduler.overload import Degradation
from dsjax.serving_config import FeedbackConfig, OverloadConfig, PathConfig, TenantConfig
from tests.fakes import Clock, assert_idle, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_engine

PATHS = {
    "hot": PathConfig(max_tokens=20),
    "warm": PathConfig(max_tokens=40, share=0.75, budget_share=0.75),
    "cold": PathConfig(share=0.5, budget_share=0.5, chunk_tokens=12),
}
FEW = {EntryKind.CSA: 6, EntryKind.HCA: 12}
SETTINGS = {
    "shortest, paths": {"scheduling_policy": "shortest", "length_penalty": 0.5, **PATHS, "num_pages": FEW},
    "priority, tenants": {
        "scheduling_policy": "priority",
        "tenants": (TenantConfig(name="vip", weight=4, reserved_seqs=1), TenantConfig(name="free", max_num_seqs=2)),
        "max_num_seqs": 4,
    },
    "groups, threshold": {"length_groups": 2.0, "preemption_threshold": 0.7, "num_pages": FEW},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_each_request_alone(name):
    rng, engine = random.Random(5), tiny_engine(**SETTINGS[name])
    prompts = {f"r{i}": random_prompt(i, rng.choice([1, 5, 8, 15, 17, 24, 33, 41])) for i in range(40)}
    waiting, events = list(prompts.items()), {}
    while waiting or engine.has_work():
        for name, prompt in waiting[:2]:
            priority, tenant = rng.randint(-1, 2), rng.choice(["", "vip", "free"])
            engine.add(request(name, prompt, max_tokens=10, priority=priority, tenant=tenant))
        waiting = waiting[2:]
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens_of(events[name]) == solo(prompt, 10), name
    assert_idle(engine)


@pytest.mark.slow
def test_under_feedback_and_degradation_answers_are_those_alone_or_their_beginnings():
    engine, clock = tiny_engine(max_num_waiting=12, num_pages=FEW), Clock()
    overload = OverloadConfig(enable_degradation=True, degrade_after_s=1.0, degraded_max_tokens=4)
    config = replace(engine.config, feedback=FeedbackConfig(target_itl_ms=300.0), overload=overload)
    engine.clock, engine.control = clock, Control(config, engine.scheduler)
    prompts = {f"r{i}": random_prompt(i, 5 + 3 * (i % 7)) for i in range(40)}
    waiting, events, limits, levels, lengths = list(prompts.items()), {}, set(), set(), {}
    while waiting or engine.has_work():
        while waiting and len(engine.scheduler.waiting) < 12:
            name, prompt = waiting.pop(0)
            lengths[name] = 10 if engine.control.ladder.level is Degradation.NONE else 4
            engine.add(request(name, prompt, max_tokens=10))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        clock.now_s += 0.1 if engine.scheduler.num_running <= 4 else 0.4  # the knee
        limits.add(engine.stats().limit_num_seqs)
        levels.add(engine.stats().degrade_level)
    assert len(limits) > 1 and levels >= {0, 1, 2} and set(lengths.values()) == {4, 10}
    for name, prompt in prompts.items():
        assert tokens_of(events[name]) == solo(prompt, 10)[: lengths[name]], name
    assert_idle(engine)
