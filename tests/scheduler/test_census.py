"""The counts of a shard's running requests equal looking at all of them."""

import itertools

import pytest

from dsjax.request import Path, Request, SamplingParams
from dsjax.scheduler import policy
from dsjax.scheduler.census import Census
from dsjax.serving_config import SchedulerConfig


def made(path, priority):
    new = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(), priority=priority)
    new.path = path
    return new


KINDS = tuple(itertools.product(Path, (-1, 0, 2)))


@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_counts_are_those_of_the_requests_that_run(name):
    config = SchedulerConfig(scheduling_policy=name)
    census, running = Census(config, lambda paths: 0.0), []

    def check():
        assert census.paths() == {request.path for request in running}
        for path in Path:
            assert census.num_members(path) == sum(request.path >= path for request in running)
        for to in (made(*kind) for kind in KINDS):
            assert census.may_give_way(to) == any(policy.gives_way(config, r, to, over_share=True) for r in running)

    check()
    for kind in (*KINDS, *KINDS[::2]):
        running.append(made(*kind))
        census.add(running[-1])
        check()
    while running:
        census.remove(running.pop(len(running) // 2))
        check()
