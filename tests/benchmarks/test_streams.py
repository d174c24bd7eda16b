"""The measurement of many streams, against a server of a few lines and against none."""

import contextlib
from typing import Any

import pytest

from benchmarks import streams
from benchmarks.metrics import Record
from dsjax.errors import ConfigError


def _record(id: int, first_s: float | None, error: str = "") -> Record:
    times = [] if first_s is None else [first_s]
    return Record(id=id, prompt_len=1, start_s=0.0, token_times_s=times, token_ids=[1] * len(times), error=error)


def test_most_overtaken_counts_the_later_ones_that_came_first():
    assert streams.most_overtaken([]) == 0
    assert streams.most_overtaken([_record(i, float(i)) for i in range(4)]) == 0
    # 0 is overtaken by 2 and 3, 1 by nobody; the failed one counts for nothing
    assert (
        streams.most_overtaken([_record(i, t) for i, t in enumerate([3.0, 4.0, 1.0, 2.0])] + [_record(4, None, "x")])
        == 2
    )


def test_measure_compares_streams_with_their_solo_runs(monkeypatch):
    sent: list[tuple[str, int | None]] = []

    @contextlib.contextmanager
    def serving(flags):
        assert flags == ("--config=nano",)
        yield "address", 1

    async def server_info(address):
        class Model:
            vocab_size, model = 50, "m"

        return None, Model

    async def run(address, items, *, arrivals, max_concurrency, params, cache_salt):
        assert arrivals == [0.0] * 5 and {params(item).max_tokens for item in items} == {3}
        sent.append((cache_salt, max_concurrency))
        records = []
        for n, item in enumerate(items):
            tokens = [item.prompt[-1] + 1 + i for i in range(3)]
            if cache_salt == "streams" and n == 3:
                tokens = tokens[:2]  # lost, and so different
            if cache_salt == "streams" and n == 4:
                tokens[2] += 1  # different
            times = [1.0 + n + i for i in range(len(tokens))]
            records.append(
                Record(id=item.id, prompt_len=len(item.prompt), start_s=0.0, token_ids=tokens, token_times_s=times)
            )
        return records, 2.0

    monkeypatch.setattr(streams, "serving", serving)
    monkeypatch.setattr(streams.online, "server_info", server_info)
    monkeypatch.setattr(streams.online, "run", run)
    result: dict[str, Any] = streams.measure(num_streams=5, input_len=4, output_len=3)
    assert sent == [("solo", 1), ("streams", None)]
    assert (result["lost"], result["different_from_solo"], result["most_overtaken"]) == (1, 2, 0)
    assert (result["completed"], result["total_output_tokens"], result["p50_ttft_ms"]) == (5, 14, 3000.0)


def test_a_server_that_does_not_start_is_an_error(capfd):
    with pytest.raises(ConfigError, match="start no server"), streams.serving(["--config=never"]):
        pass
    assert "config='never' is unknown" in capfd.readouterr().err
