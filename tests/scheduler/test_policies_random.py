"""Any trace under any policy: every request ends once with its own answer, pages return, waits obey their bounds."""

import random

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.request import Path, Status
from dsjax.scheduler.policy import MAX_RECLAIMS, Limits
from dsjax.serving_config import PathConfig, TenantConfig
from tests.engine.test_engine_soak import Traffic
from tests.fakes import ByteTokenizer, Clock, assert_idle, fake_engine

PATHS = {
    "hot": PathConfig(max_tokens=20),
    "warm": PathConfig(max_tokens=40, share=0.75, budget_share=0.75),
    "cold": PathConfig(share=0.5, budget_share=0.5, chunk_tokens=12),
}
FEW = {EntryKind.CSA: 5, EntryKind.HCA: 12}
TENANTS = (
    TenantConfig(name="vip", weight=4, reserved_seqs=1),
    TenantConfig(name="free", weight=0.5, max_num_seqs=2),
)
SETTINGS = {
    "paths": {**PATHS, "num_pages": FEW},
    "shortest": {"scheduling_policy": "shortest", "length_penalty": 0.5, **PATHS, "num_pages": FEW},
    "priority": {"scheduling_policy": "priority", "priority_step_s": 3.0, "num_pages": FEW},
    "tenants": {"tenants": TENANTS, "scheduling_policy": "shortest", **PATHS},
    "threshold": {"preemption_threshold": 0.7, "num_pages": FEW, **PATHS},
    "no preemption": {"enable_preemption": False, "num_pages": {EntryKind.CSA: 8}},
    "groups": {"length_groups": 2.0, "num_pages": FEW},
    "company": {"batch_wait_s": 2.0, **PATHS},
    "two shards": {"num_shards": 2, "scheduling_policy": "shortest", "tenants": TENANTS, **PATHS, "num_pages": FEW},
    "without chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, **PATHS, "num_pages": FEW},
}


class PolicyTraffic(Traffic):
    """Priorities, tenants, and limits that change; checks each start against those who wait."""

    def __init__(self, engine, **settings):
        super().__init__(engine, **settings)
        self.more = random.Random(settings["seed"])
        self.most_reclaims = 0

    def service(self) -> dict:
        return {"priority": self.more.randint(-1, 2), "tenant": self.more.choice(["", "", "vip", "free"])}

    def step(self):
        engine, scheduler = self.engine, self.engine.scheduler
        engine.clock.now_s += self.more.choice([0.0, 0.1, 1.0])
        if self.more.random() < 0.05:
            full = Limits.of(scheduler.config)
            low = Limits(max_num_batched_tokens=self.more.randint(1, 8), max_num_seqs=self.more.randint(1, 3))
            scheduler.limits = self.more.choice([full, low])
        before = {r: r.num_preemptions for r in scheduler.waiting if not r.num_pending}
        events = engine.step()
        started = [r for r in before if r.status is Status.RUNNING]
        # Those of n > 1 may wait for the first of them; who started and gave way in the same step did not wait.
        waiting = (r for r in before if r.status is Status.WAITING and r.sibling is None)
        left = [r for r in waiting if r.num_preemptions == before[r]]
        for one in started:
            for other in left:
                if (one.tenant, one.path) == (other.tenant, other.path):
                    assert one.order < other.order, f"{one.request_id} has overtaken {other.request_id}"
        self.check_shares()
        self.most_reclaims = max([self.most_reclaims, *(r.num_reclaims for r in self.requests())])
        return events

    def check_shares(self) -> None:
        config = self.engine.config.scheduler
        for shard in self.engine.scheduler.shards:
            cold = sum(r.path is Path.COLD for r in shard.running)
            assert cold <= max(1, int(config.cold.share * config.max_num_seqs))
        running = [r.tenant for r in self.engine.scheduler.running]
        for tenant in config.tenants:
            assert not tenant.max_num_seqs or running.count(tenant.name) <= tenant.max_num_seqs


@pytest.mark.parametrize("name", SETTINGS)
def test_random_traffic(name):
    engine = fake_engine(tokenizer=ByteTokenizer(), clock=Clock(1.0), **{"num_shards": 1, **SETTINGS[name]})
    traffic = PolicyTraffic(engine, seed=3, num_requests=250)
    traffic.run(per_step=0.4 if name == "two shards" else 0.25)
    assert traffic.num_finished > 180 and not traffic.live
    assert traffic.most_reclaims <= MAX_RECLAIMS
    assert_idle(engine)
