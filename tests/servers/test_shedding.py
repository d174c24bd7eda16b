"""Requests that the engine gives up while they wait, through the engine thread to their streams."""

import asyncio

import pytest

from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Request
from servers.engine_thread import EngineThread
from tests.fakes import assert_idle, fake_engine, request, tokens_of
from tests.servers.harness import TIMEOUT_S


def test_a_shed_request_ends_with_when_to_come_back_and_others_with_their_answers():
    def req(name: str, priority: int, n: int = 1) -> Request:
        return request(name, [97], max_tokens=3, priority=priority, n=n)

    async def body():
        engine = fake_engine(max_num_waiting=3, max_num_seqs=1)
        thread = EngineThread(lambda: engine)
        # Commands that come before the engine is ready are done in order before its first step.
        kept, shed = thread.submit(req("kept", 1)), thread.submit(req("shed", 2, n=2))
        refused, urgent = thread.submit(req("refused", 2)), thread.submit(req("urgent", 0))
        thread.start()
        try:
            for stream, words in ((shed, "given up while waiting"), (refused, "max_num_waiting=3")):
                with pytest.raises(RequestError, match=words) as caught:
                    await stream.take_all()
                assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.RESOURCE_EXHAUSTED, 1.0)
            for stream in (kept, urgent):
                assert tokens_of(await stream.take_all()) == [98, 99, 100]
            stats = await thread.call(lambda e: e.stats())
            assert (stats.num_shed, stats.num_refused, stats.num_requests, stats.num_finished) == (2, 1, 4, 4)
        finally:
            assert await thread.stop(TIMEOUT_S)
        assert_idle(engine)

    asyncio.run(asyncio.wait_for(body(), 2 * TIMEOUT_S))
