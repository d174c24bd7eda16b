"""The arithmetic of the figures, on times small enough to work out by hand."""

import math

import pytest

from benchmarks.metrics import PADDING, Record, compare, details, max_concurrent, padded_shares, report, summarize


def record(id=0, prompt_len=10, start_s=0.0, times=(), tokens=(), **kwargs) -> Record:
    return Record(
        id=id, prompt_len=prompt_len, start_s=start_s, token_times_s=list(times), token_ids=list(tokens), **kwargs
    )


# a: first token after 1 s, then one each 0.5 s; b: first after 3 s, then two tokens in one message 1 s later
A = record(id=0, prompt_len=10, start_s=0.0, times=[1.0, 1.5, 2.0], tokens=[5, 6, 7])
B = record(id=1, prompt_len=30, start_s=1.0, times=[4.0, 5.0], tokens=[5, 6, 7], cached_tokens=16)


def test_times_of_one_request():
    assert (A.ttft_s, A.latency_s, A.tpot_s, A.itls_s) == (1.0, 2.0, 0.5, [0.5, 0.5])
    assert (B.ttft_s, B.latency_s, B.tpot_s, B.itls_s) == (3.0, 4.0, 0.5, [1.0])


def test_one_token_has_no_time_per_output_token():
    one = record(times=[2.0], tokens=[1])
    assert one.tpot_s is None
    assert one.itls_s == []
    assert summarize([one], 2.0)["mean_tpot_ms"] == 0.0


def test_totals_and_throughput():
    result = summarize([A, B], 5.0)
    assert result["completed"] == 2
    assert result["failed"] == 0
    assert result["total_input_tokens"] == 40
    assert result["total_output_tokens"] == 6
    assert result["total_cached_tokens"] == 16
    assert result["request_throughput"] == 0.4
    assert result["output_throughput"] == 1.2
    assert result["total_token_throughput"] == 9.2
    assert result["max_concurrent_requests"] == 2


def test_latencies_in_milliseconds():
    result = summarize([A, B], 5.0)
    assert result["mean_ttft_ms"] == 2000.0
    assert result["median_ttft_ms"] == 2000.0
    assert result["std_ttft_ms"] == 1000.0
    assert result["p50_ttft_ms"] == 2000.0
    assert result["p99_ttft_ms"] == pytest.approx(2980.0)  # linear between 1000 and 3000
    assert result["mean_tpot_ms"] == 500.0
    assert result["mean_itl_ms"] == pytest.approx(2000.0 / 3)
    assert result["median_itl_ms"] == 500.0
    assert result["mean_e2el_ms"] == 3000.0


def test_a_failed_request_counts_only_as_failed():
    broken = record(id=2, prompt_len=999, times=[9.0], tokens=[1], error="INTERNAL: a step failed")
    silent = record(id=3, prompt_len=999)  # ended without a token and without an error
    result = summarize([A, B, broken, silent], 5.0)
    assert result["failed"] == 2
    assert {k: v for k, v in result.items() if k != "failed"} == {
        k: v for k, v in summarize([A, B], 5.0).items() if k != "failed"
    }


def test_nothing_completed_is_zeros():
    result = summarize([record(error="UNAVAILABLE: draining")], 1.0)
    assert (result["completed"], result["failed"], result["output_throughput"]) == (0, 1, 0.0)
    assert not any(math.isnan(v) for v in result.values())
    assert result["p99_e2el_ms"] == 0.0


def test_field_names_are_those_of_vllm():
    result = summarize([A, B], 5.0)
    names = "duration completed failed total_input_tokens total_output_tokens request_throughput output_throughput"
    names += " total_token_throughput max_concurrent_requests"
    names += "".join(f" {s}_{n}_ms" for s in ("mean", "median", "std", "p99") for n in ("ttft", "tpot", "itl", "e2el"))
    assert set(names.split()) <= set(result)


def test_max_concurrent_counts_an_end_before_a_start():
    first = record(start_s=0.0, times=[2.0], tokens=[1])
    second = record(start_s=2.0, times=[4.0], tokens=[1])
    third = record(start_s=3.0, times=[3.5], tokens=[1])
    assert max_concurrent([first, second]) == 1
    assert max_concurrent([first, second, third]) == 2
    assert max_concurrent([]) == 0


def test_compare_counts_first_tokens_and_whole_answers():
    got = [
        record(id=0, times=[1.0], tokens=[5, 6]),
        record(id=1, times=[1.0], tokens=[5, 9]),
        record(id=2, times=[1.0], tokens=[8, 6]),
        record(id=3, times=[1.0], tokens=[1]),  # not in the reference
    ]
    result = compare(got, {"0": [5, 6], "1": [5, 6], "2": [5, 6]})
    assert result == {"match_first": 2, "match_all": 1, "match_of": 3, "mismatched_ids": [1, 2]}


def test_details_are_one_entry_a_request():
    late = record(id=2, prompt_len=4, start_s=7.0, error="CANCELLED: gone")
    assert details([B, late]) == {
        "input_lens": [30, 4],
        "output_lens": [3, 0],
        "start_times": [0.0, 6.0],
        "ttfts": [3.0, 0.0],
        "itls": [[1.0], []],
        "errors": ["", "CANCELLED: gone"],
    }


def test_padding_is_that_of_the_steps_in_between():
    before = dict(zip(PADDING, (10, 5, 7, 7), strict=True))
    after = dict(zip(PADDING, (30, 10, 27, 7), strict=True))
    shares = {"decode_padded_share": 0.25, "mixed_padded_share": 0.0, "padded_share": 0.125}
    assert padded_shares(before, after) == shares
    assert padded_shares(before, before) == dict.fromkeys(shares, 0.0)
    lines = report(summarize([A], 1.0) | shares).splitlines()
    assert "Padding in the steps (decode; mixed):   12.5% (25.0%; 0.0%)" in lines


def test_report_shows_the_figures():
    lines = report(summarize([A, B], 5.0) | compare([A], {"0": [5, 6, 7]})).splitlines()
    values = dict(line.rsplit(None, 1) for line in lines if "of" not in line)
    assert values["Output token throughput (tok/s):"] == "1.20"
    assert values["Mean TTFT (ms):"] == "2000.00"
    assert lines[-1].split() == "All tokens = reference: 1 of 1".split()
