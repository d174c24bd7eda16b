"""The job store alone, on a clock of its own."""

import asyncio

import pytest

from dsjax.request import Request, SamplingParams
from servers.jobs import PROMPT_TOKEN_BYTES, JobStore
from servers.prompts import Prompt
from servers.streams import EventStream


def test_results_expire_job_ttl_s_after_the_end_of_their_jobs():
    class Thread:
        def submit(self, request, *, interval, max_unread_tokens, keeper):
            return EventStream(request, max_unread_tokens=max_unread_tokens, keeper=keeper)

    async def test():
        now, ended = [0.0], []
        store = JobStore(Thread(), max_num_jobs=3, max_job_bytes=1000, job_ttl_s=10.0,
                         on_end=lambda job: ended.append(job.request.request_id), clock=lambda: now[0])  # fmt: skip

        def open(id: str):
            job = store.open(
                Request(request_id=id, prompt_token_ids=[1] * 9, params=SamplingParams()), Prompt([], None), 0
            )
            store.publish(job)
            return job

        jobs = {id: open(id) for id in "abc"}
        assert (store.num_live, store.num_bytes) == (3, 27 * PROMPT_TOKEN_BYTES)
        now[0] = 5.0
        jobs["b"].stream.close()
        now[0] = 6.0
        jobs["a"].stream.close()
        assert (store.num_live, ended) == (1, ["b", "a"])
        assert [store.expires_in_s(job) for job in jobs.values()] == [10.0, 9.0, None]
        now[0] = 14.9
        assert store.get("b") is jobs["b"]
        now[0] = 15.0
        with pytest.raises(Exception, match=r"job_id='b' is no job: .*ended more than job_ttl_s=10 ago"):
            store.get("b")
        assert (store.get("a"), store.get("c"), store.num_jobs) == (jobs["a"], jobs["c"], 2)
        now[0] = 1e9
        assert store.get("c") is jobs["c"]  # it has not ended
        assert (store.num_jobs, store.num_bytes) == (1, 9 * PROMPT_TOKEN_BYTES)

    asyncio.run(test())
