"""What `add`, `cancel`, deadlines, limits and stops do, on a runner whose next token is the last one + 1."""

import re

import numpy as np
import pytest

from dsjax.cache.spec import EntryKind
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import FinishReason
from tests.fakes import EOS, ByteTokenizer, assert_idle, check_caches, drain, fake_engine, request, tokens_of

MAX = 64  # max_model_len here


def refused(engine, req):
    """(code, message) of a refusal; nothing of the request stays."""
    with pytest.raises(RequestError) as caught:
        engine.add(req)
    assert not engine.has_work()
    return caught.value.code, str(caught.value)


def text_of(events, index=0):
    return "".join(e.text for e in events if e.index == index)


# --- prompts and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([-1, 3], {}, "prompt token -1 is not a token"),
        ([3, 256], {}, r"prompt token 256 is not a token.*vocab_size=256"),
        ([1] * MAX, {}, f"the prompt has {MAX} tokens.*max_model_len={MAX}"),
        ([1] * (MAX + 1), {}, f"the prompt has {MAX + 1} tokens.*max_model_len={MAX}"),
        ([1] * 1_200_000, {}, f"the prompt has 1200000 tokens.*max_model_len={MAX}"),
        ([1] * (MAX - 2), {"min_tokens": 3}, "min_tokens=3 is more than the 2 tokens"),
        ([1], {"logit_bias": {256: 1.0}}, "logit_bias names token 256"),
        ([1], {"stop_token_ids": [256]}, "stop_token_ids names token 256"),
        ([1], {"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
        ([1], {"stop": ["x"]}, "stop needs a tokenizer"),
        ([1, 2.5, 3], {}, r"prompt\[1\]=2.5 is not allowed: it must be a whole number"),
        ([1, None], {}, r"prompt\[1\]=None is not allowed: it must be a whole number"),
        ([1, [2]], {}, r"prompt\[1\]=\[2\] is not allowed: it must be a whole number"),
        ([1, 1 << 70], {}, f"prompt token {1 << 70} is not a token"),
        ([1, 10**5000], {}, "prompt token .*is not a token"),
        ([1], {"logit_bias": dict.fromkeys(range(256), -1e308)}, "logit_bias bans all tokens: one at least must have"),
        ([1], {"min_tokens": 5, "stop_token_ids": range(256)}, "min_tokens=5 cannot be reached: every token ends"),
        (
            [1],
            {"min_tokens": 5, "stop_token_ids": range(1, 255), "ignore_eos": False, "logit_bias": {255: -np.inf}},
            "min_tokens=5 cannot be reached",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(prompt, params, message):
    code, text = refused(fake_engine(max_model_len=MAX), request("a", prompt, **params))
    assert code is ErrorCode.INVALID_ARGUMENT
    assert re.search(message, text), text


def test_min_tokens_over_max_tokens_is_refused():
    with pytest.raises(RequestError, match=r"min_tokens=5.*max_tokens=4"):
        request("a", [1], min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="max_tokens=0"):
        request("a", [1], max_tokens=0)


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_output"),
    [(MAX - 1, None, 1), (MAX - 1, 5, 1), (MAX - 2, None, 2), (MAX - 3, 2, 2), (1, None, MAX - 1), (1, 1, 1)],
)
def test_lengths_at_max_model_len(length, max_tokens, num_output):
    engine = fake_engine(max_model_len=MAX)
    engine.add(request("a", [7] * length, max_tokens=max_tokens))
    events = drain(engine)["a"]
    assert tokens_of(events) == [8 + i for i in range(num_output)]
    assert (events[-1].finish_reason, events[-1].num_output_tokens) == (FinishReason.LENGTH, num_output)
    assert_idle(engine)


# window 8, page 8, unit 8, block of queries 16, budget 32
@pytest.mark.parametrize("length", sorted({n + d for n in (1, 4, 8, 16, 32, 64, 96) for d in (-1, 0, 1)} - {0}))
@pytest.mark.parametrize("caching", [True, False])
def test_lengths_at_every_edge(length, caching):
    engine = fake_engine(max_model_len=128, cache={"enable_prefix_caching": caching})
    for name in ("first", "again"):
        engine.add(request(name, [i % 200 for i in range(length)], max_tokens=12))
        events = drain(engine)[name]
        assert tokens_of(events) == [(length - 1) % 200 + 1 + i for i in range(12)]
    assert events[-1].num_cached_tokens == ((length - 1) // 8 * 8 if caching else 0)
    assert_idle(engine)


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on():
    engine = fake_engine(num_pages={EntryKind.CSA: 2}, cache={"enable_prefix_caching": False})  # 67 tokens
    assert engine.runner.spec.max_request_tokens == 67
    engine.add(request("other", [5], max_tokens=20))
    engine.step()
    with pytest.raises(RequestError, match="the cache holds 67: raise num_gpu_blocks_override") as caught:
        engine.add(request("never", [1] * 67))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(RequestError, match="prompt and max_tokens make 68 tokens"):
        engine.add(request("never", [1] * 48, max_tokens=20))
    engine.add(request("just", [1] * 66))
    engine.add(request("fits", [1] * 47, max_tokens=20))
    events = drain(engine)
    assert {name: len(tokens_of(e)) for name, e in events.items()} == {"other": 20, "just": 1, "fits": 20}


# --- ids -------------------------------------------------------------------------------------------


def test_a_live_id_is_refused_and_the_first_goes_on():
    engine = fake_engine()
    engine.add(request("x", [1], max_tokens=3))
    engine.step()
    with pytest.raises(RequestError, match="request_id='x' is live") as caught:
        engine.add(request("x", [50], max_tokens=3))
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    assert tokens_of(drain(engine)["x"]) == [2, 3, 4]
    engine.add(request("x", [50], max_tokens=3))
    assert tokens_of(drain(engine)["x"]) == [51, 52, 53]


def test_ids_that_look_like_siblings_are_other_requests():
    engine = fake_engine()
    engine.add(request("x", [1], n=2, max_tokens=2))
    engine.add(request("x#0", [50], max_tokens=2))
    engine.add(request("x#1", [60], n=2, max_tokens=2))
    events = drain(engine)
    assert {name: tokens_of(e) for name, e in events.items()} == {"x": [2, 3], "x#0": [51, 52], "x#1": [61, 62]}
    assert tokens_of(events["x"], 1) == [2, 3]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_id_used_again_at_once_after_cancel(num_steps):
    engine = fake_engine(max_num_seqs=2)
    engine.add(request("company", [100], max_tokens=90))
    for i in range(100):
        engine.add(request("x", [i], max_tokens=9))
        for _ in range(num_steps):
            engine.step()
        assert engine.cancel("x")
        engine.add(request("x", [i + 20], max_tokens=2))
        got = []
        while not got or not got[-1].finished:
            got += [e for e in engine.step() if e.request_id == "x"]
        assert tokens_of(got) == [i + 21, i + 22]
        check_caches(engine)
        stats = engine.stats()
        assert stats.num_waiting >= 0 and 0 <= stats.num_running <= 2
    engine.cancel("company")
    drain(engine)
    assert_idle(engine)


# --- cancel ----------------------------------------------------------------------------------------


def test_cancel_while_waiting_mid_chunk_after_the_end_and_twice():
    engine = fake_engine(max_num_seqs=1, max_num_batched_tokens=8)
    assert not engine.cancel("unknown")
    engine.add(request("a", range(100, 124), max_tokens=4))
    engine.add(request("b", [1], max_tokens=4))
    engine.step()
    assert engine.cancel("b")  # while it waits
    engine.step()
    assert engine.stats().num_running == 1
    assert engine.cancel("a")  # between chunks 2 and 3
    assert not engine.cancel("a")
    stats = engine.stats()
    assert (stats.num_running, stats.kv_cache_usage) == (0, 0.0)  # pages are back at once
    assert engine.has_work()  # a step is in flight
    assert drain(engine) == {}
    assert_idle(engine)
    engine.add(request("c", [1], max_tokens=1))
    drain(engine)
    assert not engine.cancel("c")
    assert_idle(engine)


def test_cancel_ends_all_of_n():
    engine = fake_engine()
    engine.add(request("a", [1], n=3, max_tokens=20))
    for _ in range(4):
        engine.step()
    assert engine.cancel("a")
    assert drain(engine) == {}
    assert_idle(engine)


def test_cancel_between_chunks_leaves_only_complete_units():
    prompt = list(range(100, 130))
    engine = fake_engine(max_num_batched_tokens=12, cache={"prefix_unit_tokens": 16, "snapshot_interval_tokens": 16})
    engine.add(request("a", prompt, max_tokens=4))
    engine.step()  # 12 tokens: no unit yet
    engine.cancel("a")
    drain(engine)
    assert engine.caches[0].prefix.num_nodes <= 1  # the root
    engine.add(request("b", prompt, max_tokens=4))
    events = drain(engine)["b"]
    assert (tokens_of(events), events[-1].num_cached_tokens) == ([130, 131, 132, 133], 0)
    # a unit and a part of the next one
    engine = fake_engine(max_num_batched_tokens=20, cache={"prefix_unit_tokens": 16, "snapshot_interval_tokens": 16})
    engine.add(request("a", prompt, max_tokens=4))
    engine.step()
    engine.step()
    engine.cancel("a")
    drain(engine)
    engine.add(request("b", prompt, max_tokens=4))
    events = drain(engine)["b"]
    assert (tokens_of(events), events[-1].num_cached_tokens) == ([130, 131, 132, 133], 16)
    assert_idle(engine)


# --- deadlines -------------------------------------------------------------------------------------


def test_a_deadline_that_passes_in_the_queue_never_starts():
    now = 1000.0
    engine = fake_engine(max_num_seqs=1, clock=lambda: now)
    others = [f"a{shard}" for shard in range(engine.runner.num_shards)]  # one in every slot
    for name in others:
        engine.add(request(name, [1], max_tokens=10))
    engine.add(request("b", [1], max_tokens=10, deadline_s=1000.2, n=2))
    engine.step()
    now = 1000.2
    events = [e for e in engine.step() if e.request_id == "b"]
    assert [(e.index, e.token_ids, e.error.code, e.finished) for e in events] == [
        (i, (), ErrorCode.DEADLINE_EXCEEDED, True) for i in range(2)
    ]
    assert "while waiting, after 0 output tokens" in str(events[0].error)
    assert {row.request_id for step in engine.runner.sent for row in step} == {f"{name}#0" for name in others}
    events = drain(engine)
    assert all(tokens_of(events[name])[-1] == 11 for name in others)
    assert engine._deadlines == 0


def test_a_deadline_that_passes_while_running_ends_it_in_the_next_step():
    now = 1000.0
    engine = fake_engine(clock=lambda: now)
    engine.add(request("a", [1], max_tokens=100, deadline_s=1000.2))
    for _ in range(4):
        engine.step()
    now = 1000.3
    (event,) = engine.step()
    assert (event.error.code, event.num_output_tokens, event.finish_reason) == (ErrorCode.DEADLINE_EXCEEDED, 3, None)
    assert "while running, after 3 output tokens" in str(event.error)
    assert_idle(engine) if not engine.has_work() else drain(engine)
    assert_idle(engine)
    assert engine._deadlines == 0


# --- stops -----------------------------------------------------------------------------------------


def test_eos_first_gives_an_empty_answer_and_ignore_eos_goes_on():
    engine = fake_engine(tokenizer=ByteTokenizer())
    engine.add(request("a", [255], ignore_eos=False))
    (event,) = drain(engine)["a"]
    assert (event.token_ids, event.text, event.finish_reason, event.matched_stop) == (
        (EOS,),
        "",
        FinishReason.STOP,
        None,
    )
    engine.add(request("b", [255], ignore_eos=True, max_tokens=3))
    events = drain(engine)["b"]
    assert (tokens_of(events), text_of(events)) == ([0, 1, 2], "\x00\x01\x02")
    assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_named_and_its_text_shown_only_if_asked_for(include):
    engine = fake_engine(tokenizer=ByteTokenizer())
    engine.add(request("a", b"a", stop_token_ids=[ord("d")], include_stop_str_in_output=include))
    events = drain(engine)["a"]
    assert (tokens_of(events), events[-1].matched_stop) == (list(b"bcd"), ord("d"))
    assert text_of(events) == ("bcd" if include else "bc")
    assert events[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("stops", "matched", "text", "num_tokens"),
    [
        (["c"], "c", "b", 2),
        (["b"], "b", "", 1),
        (["cd"], "cd", "b", 3),
        (["cde"], "cde", "b", 4),
        (["bcdef"], "bcdef", "", 5),
        (["de", "def"], "de", "bc", 4),  # one is the beginning of the other
        (["cdx", "de"], "de", "bc", 4),  # what was held for the first belongs to the second or is shown
        (["xyz"], None, "bcdefghi", 8),
        (["ij"], None, "bcdefghi", 8),  # its beginning was held back and is shown at the end
    ],
)
def test_stop_strings_over_tokens(stops, matched, text, num_tokens):
    engine = fake_engine(tokenizer=ByteTokenizer())
    engine.add(request("a", b"a", stop=stops, max_tokens=8))
    events = drain(engine)["a"]
    assert (text_of(events), events[-1].matched_stop, len(tokens_of(events))) == (text, matched, num_tokens)
    assert events[-1].finish_reason is (FinishReason.STOP if matched else FinishReason.LENGTH)
    shown = ""
    for event in events:  # at no time is a part of the matched stop on show
        shown += event.text
        assert text.startswith(shown)
    assert_idle(engine)


def test_a_character_of_several_tokens_is_shown_once_whole():
    class Cut(ByteTokenizer):
        """Token i is byte i of a text."""

        def token_bytes(self, token_id):
            return "naïve 🙂!".encode()[token_id - 1 : token_id]

    engine = fake_engine(tokenizer=Cut())
    engine.add(request("a", [0], max_tokens=12))
    assert [e.text for e in drain(engine)["a"]] == ["n", "a", "", "ï", "v", "e", " ", "", "", "", "🙂", "!"]
    engine.add(request("b", [0], max_tokens=9))
    assert text_of(drain(engine)["b"]) == "naïve \ufffd"


# --- n and counting --------------------------------------------------------------------------------


def test_n_are_independent_sequences():
    engine = fake_engine()
    engine.add(request("a", [1, 2, 3], n=4, max_tokens=5))
    events = drain(engine)["a"]
    for index in range(4):
        assert tokens_of(events, index) == [4, 5, 6, 7, 8]
    assert sorted(e.index for e in events if e.finished) == [0, 1, 2, 3]
    stats = engine.stats()
    assert (stats.num_requests, stats.num_finished, stats.num_generated_tokens) == (4, 4, 20)


def test_seeds_are_the_callers_or_drawn_from_the_engines():
    def seeds(engine, **params):
        engine.add(request("a", [1], n=2, max_tokens=1, **params))
        found = [r.seed for r in engine.scheduler.waiting]
        drain(engine)
        return found

    assert seeds(fake_engine(), seed=5) == [5, 6]
    one, two = fake_engine(seed=1), fake_engine(seed=1)
    assert seeds(one) == seeds(two)
    assert seeds(one) != seeds(fake_engine(seed=1))  # the second request of an engine has others
    assert seeds(fake_engine(seed=2)) != seeds(fake_engine(seed=1))


def test_a_step_that_raises_reaches_the_caller():
    engine = fake_engine()
    engine.add(request("a", [1], max_tokens=5))
    engine.step()
    engine.runner.fail = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()


def test_reset_of_the_prefix_cache():
    engine = fake_engine()
    prompt = list(range(40))
    for expected in (0, 32):
        engine.add(request("a", prompt, max_tokens=1))
        assert drain(engine)["a"][-1].num_cached_tokens == expected
    engine.reset_prefix_cache()
    assert engine.stats().num_pages_cached == 0
    engine.add(request("a", prompt, max_tokens=1))
    assert drain(engine)["a"][-1].num_cached_tokens == 0
    assert_idle(engine)
