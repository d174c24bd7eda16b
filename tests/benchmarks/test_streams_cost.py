"""The measurement of what streams cost: its engine, its client and its table, each alone."""

import asyncio
import json
import time

import pytest

from benchmarks import paced, streams_cost, streams_load
from benchmarks.streams_load import Load
from configs import serving as configs
from dsjax.request import Request, SamplingParams
from tests.servers.fakes import FakeEngine
from tests.servers.harness import Harness, run


def test_the_paced_engine_counts_up_and_logs_steps_and_first_tokens(tmp_path):
    path = tmp_path / "log.json"
    engine = paced.LoggedEngine(paced.make_engine(configs.load("nano"), step_s=0.0), str(path))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    begin_s = time.monotonic()
    for name, last in (("a", 7), ("b", 2046)):
        engine.add(Request(request_id=name, prompt_token_ids=[5, last], params=params))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens == {"a": [8, 9, 10], "b": [2047, 0, 1]}
    engine.close()
    log = json.loads(path.read_text())
    ends = [end_s for end_s, _ in log["steps"]]
    assert ends == sorted(ends)
    assert log["first_tokens"].keys() == {"a", "b"}
    for read_s, returned_s in log["first_tokens"].values():
        assert begin_s <= read_s <= returned_s and returned_s in ends


def load_of(h: Harness, num_streams: int, begin_s: float, seconds: float) -> Load:
    return Load(
        address=f"127.0.0.1:{h.server.port}",
        vocab_size=256,
        num_streams=num_streams,
        output_len=5,
        stream_interval=0,
        begin_s=begin_s,
        end_s=begin_s + seconds,
    )


@pytest.mark.parametrize("script", ["", "x"])
def test_the_client_counts_and_checks_every_stream(monkeypatch, script):
    monkeypatch.setattr(streams_load, "RAMP_S", 0.0)

    async def test(h: Harness):
        now_s = time.monotonic()
        load = load_of(h, num_streams=3, begin_s=now_s, seconds=0.3)
        counts = await asyncio.to_thread(streams_load.run, load)
        complete = counts["streams"] - 3  # at least: the last ones were cut short, perhaps before their first token
        assert 0 <= complete <= counts["messages"] <= counts["tokens"]
        assert complete <= counts["wrong"] if script else counts["wrong"] == 0
        await h.idle()
        times = await asyncio.to_thread(streams_load.time_first_tokens, load, "first-")
        assert times == {}  # the time is over

    run(test, FakeEngine(script=script))


def test_every_first_token_is_timed():
    async def test(h: Harness):
        begin_s = time.monotonic()
        load = load_of(h, num_streams=0, begin_s=begin_s, seconds=0.2)
        times = await asyncio.to_thread(streams_load.time_first_tokens, load, "first-")
        assert list(times) == [f"first-{i}" for i in range(len(times))] and times
        assert {name for what, name in h.engine.log if what == "start"} == times.keys()
        await h.idle()

    run(test)


def test_a_row_of_the_table():
    shares = "front_end event_loop grpc_threads hand_over detokenizing engine_steps".split()
    result = {
        "num_streams": 300,
        "tokens_per_s": 8951.2,
        "messages_per_s": 2012.0,
        "cpu": {name: number / 100 for number, name in enumerate(shares, 1)},
        "p50_first_token_ms": 1.5,
        "p99_first_token_ms": 2.5,
        "p50_in_engine_ms": 0.25,
        "num_first_tokens": 66,
    }
    cells = "300 8951 2012 1.0% 2.0% 3.0% 4.0% 5.0% 6.0% 1.50 2.50 0.25 66".split()
    assert streams_cost.row(result) == f"| {' | '.join(cells)} |"
    assert streams_cost.HEADER.splitlines()[0].count("|") == streams_cost.row(result).count("|")
