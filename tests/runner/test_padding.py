"""Padding is counted by kind of step, over all data shards and micro-batches, and the engine's stats have it."""

from benchmarks import host_engine
from dsjax.request import Request, SamplingParams
from dsjax.runner.buckets import Bucket
from dsjax.runner.padding import Padding, PaddingStats


def test_nothing_has_run():
    assert Padding().stats() == PaddingStats(
        num_decode_bucket_tokens=0,
        num_decode_padded_tokens=0,
        decode_padded_share=0.0,
        num_mixed_bucket_tokens=0,
        num_mixed_padded_tokens=0,
        mixed_padded_share=0.0,
    )


def test_kinds_of_steps_are_counted_apart():
    padding = Padding()
    padding.add(Bucket(4, 4, 1), 1, 3)
    padding.add(Bucket(4, 4, 1), 1, 4)
    padding.add(Bucket(64, 8, 16), 3, 100)  # of three shards or micro-batches
    assert padding.stats() == PaddingStats(
        num_decode_bucket_tokens=8,
        num_decode_padded_tokens=1,
        decode_padded_share=0.125,
        num_mixed_bucket_tokens=192,
        num_mixed_padded_tokens=92,
        mixed_padded_share=92 / 192,
    )


def test_an_engine_counts_the_steps_that_its_runner_sends():
    engine = host_engine.make_engine(4)
    for i in range(3):
        prompt = [1 + i] * 20
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine.add(Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params))
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    # three prompts in one step of 64 tokens, then two decode steps of three rows in four
    assert (stats.num_mixed_bucket_tokens, stats.num_mixed_padded_tokens) == (64, 4)
    assert (stats.num_decode_bucket_tokens, stats.num_decode_padded_tokens) == (8, 2)
    assert (stats.mixed_padded_share, stats.decode_padded_share) == (1 / 16, 1 / 4)
    assert stats.num_computed_tokens == 66
