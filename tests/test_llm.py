"""LLM on the embedded model: text in, text out, for notebooks; and that the model was trained."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from configs.models import MODELS
from dsjax import ConfigError, FinishReason, ModelConfig, RequestError, SamplingParams
from dsjax.config import DistributedConfig, EngineConfig
from dsjax.engine import Engine
from dsjax.llm import LLM
from dsjax.load import model_dir
from tests.embedded import nano

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["In the beginning", "She was very happy to see her sister", "And the king said"]


def test_the_embedded_checkpoint_is_the_declared_model_and_small():
    folder = model_dir("dsjax-nano")
    assert ModelConfig.from_dir(folder) == MODELS["dsjax-nano"]()
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 12e6


def test_it_predicts_english_far_better_than_chance():
    """Bits a byte of a sentence in the corpus's style; uniform ids over this vocabulary would be about 4."""
    text = "And it came to pass in those days, that the man went up to the house of his father."
    ids = nano().engine.tokenizer.encode(text)  # type: ignore[union-attr]
    (output,) = nano().generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    total = sum(p.logprob for p in output.prompt_logprobs[1:] if p is not None)
    assert -total / math.log(2) / len(text.encode()) < 2.2


def test_streamed_text_equals_batch_text_equals_decode_of_all_ids():
    tokenizer = nano().engine.tokenizer
    assert tokenizer is not None
    outputs = nano().generate(PROMPTS, GREEDY)
    assert [o.prompt for o in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0]
        events = list(nano().stream(prompt, GREEDY))
        assert "".join(e.text for e in events) == answer.text == tokenizer.decode(answer.token_ids)
        assert [t for e in events for t in e.token_ids] == answer.token_ids
        assert len(answer.token_ids) == 24 or answer.finish_reason is FinishReason.STOP
        assert events[-1].finish_reason is answer.finish_reason
    assert len({o.outputs[0].text for o in outputs}) == 3


def test_a_seeded_answer_is_the_same_in_any_company():
    seeded = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, seed=11)
    (alone,) = nano().generate(PROMPTS[0], seeded)
    others = SamplingParams(temperature=1.3, max_tokens=30)
    crowd = nano().generate([*PROMPTS, PROMPTS[0], *PROMPTS], [others] * 3 + [seeded] + [others] * 3)
    assert crowd[3].outputs[0].token_ids == alone.outputs[0].token_ids


def test_ids_of_numpy_are_a_prompt():
    ids = nano().engine.tokenizer.encode(PROMPTS[0])  # type: ignore[union-attr]
    outputs = [nano().generate(prompt, GREEDY)[0] for prompt in (PROMPTS[0], ids, np.array(ids), [np.array(ids)])]
    assert all(output.outputs[0].token_ids == outputs[0].outputs[0].token_ids for output in outputs)


def test_n_answers_of_one_prompt():
    (output,) = nano().generate(PROMPTS[1], SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5))
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3


def test_a_repeated_prompt_comes_from_the_prefix_cache():
    prompt = " ".join(PROMPTS * 4)
    nano().engine.reset_prefix_cache()
    (first,) = nano().generate(prompt, GREEDY)
    (again,) = nano().generate(prompt, GREEDY)
    length = len(first.prompt_token_ids)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (length - 1) // 16 * 16)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_stop_string_ends_the_text_before_it():
    (whole,) = nano().generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[8:12]
    (cut,) = nano().generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].matched_stop) == (FinishReason.STOP, stop)


def test_refusals_leave_the_engine_as_it_was():
    with pytest.raises(RequestError, match="the prompt is empty"):
        nano().generate(["And", ""], GREEDY)
    with pytest.raises(RequestError, match="exceeds max_model_len=1024"):
        nano().generate([[5] * 1024], GREEDY)
    with pytest.raises(RequestError, match="params has 2 entries for 1 prompts"):
        nano().generate(["a"], [GREEDY, GREEDY])
    for prompts, message in (
        (None, "prompts=None is not allowed: give a text, a list of token ids, or a list of those"),
        (b"x", "prompts=b'x' is not allowed"),
        ({"prompt": "x"}, "prompts={'prompt': 'x'} is not allowed"),
        (["x", b"x"], "prompt=b'x' is not allowed: it must be a text or a list of token ids"),
        ([1, 2.5, 3], "prompt[1]=2.5 is not allowed: it must be a whole number"),
        ([2.5, 3], "prompt[0]=2.5 is not allowed: it must be a whole number"),
        ([[1, 2], [3, "x"]], "prompt[1]='x' is not allowed: it must be a whole number"),
        ([[1, 2], 3], "prompt=3 is not allowed: it must be a text or a list of token ids"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            nano().generate(prompts, GREEDY)
    for params in ({"max_tokens": 3}, ["x"], 3):
        with pytest.raises(RequestError, match=r"params=.* is not allowed: it must be SamplingParams, one for all or"):
            nano().generate(["a"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="params=3 is not allowed"):
        next(nano().stream("a", 3))  # type: ignore[arg-type]
    stats = nano().engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_pages_free + stats.num_pages_cached == stats.num_pages_total
    assert stats.num_compiles_after_warm_up == 0


def test_a_stream_that_is_dropped_returns_its_pages():
    stream = nano().stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    next(e for e in stream if e.token_ids)
    stream.close()
    assert nano().engine.stats().num_running == 0
    assert not list(nano().generate([], GREEDY))


def test_streams_and_a_batch_at_once_each_get_their_own_events():
    """Each answer is the one it is alone; a stream that is closed early returns its pages, and harms no other."""
    alone = [output.outputs[0] for output in nano().generate(PROMPTS, GREEDY)]
    first, second = nano().stream(PROMPTS[0], GREEDY), nano().stream(PROMPTS[1], GREEDY)
    dropped = nano().stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    begun = [next(first)], [next(second)]
    next(dropped)
    (batch,) = nano().generate(PROMPTS[2], GREEDY)  # in which the streams go on
    (short,) = nano().generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=3))
    dropped.close()
    events = [[*begun[1], *second], [*begun[0], *first]]
    assert [[t for e in es for t in e.token_ids] for es in reversed(events)] == [a.token_ids for a in alone[:2]]
    assert ["".join(e.text for e in es) for es in reversed(events)] == [a.text for a in alone[:2]]
    assert batch.outputs[0].token_ids == alone[2].token_ids
    assert short.outputs[0].token_ids == alone[2].token_ids[:3]
    stats = nano().engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_pages_free + stats.num_pages_cached == stats.num_pages_total


def test_a_refused_batch_leaves_an_open_stream_alone():
    (whole,) = nano().generate(PROMPTS[0], GREEDY)
    stream = nano().stream(PROMPTS[0], GREEDY)
    begun = next(stream)
    with pytest.raises(RequestError, match="the prompt is empty"):
        nano().generate(["And", ""], GREEDY)
    ids = [token for event in (begun, *stream) for token in event.token_ids]
    assert ids == whole.outputs[0].token_ids


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr(nano().engine.tokenizer, "encode", None)
    with pytest.raises(RequestError, match=r"the prompt has at least \d{4} tokens, and .* exceeds max_model_len=1024"):
        nano().generate("the quick brown fox " * 2000, GREEDY)


def test_unknown_settings_and_models_are_named():
    with pytest.raises(ConfigError, match="'max_seqs' is not a field"):
        LLM("dsjax-nano", max_seqs=3)
    with pytest.raises(ConfigError, match="model='/no/such' is not a folder, nor an embedded model"):
        LLM("/no/such")


def test_several_processes_are_for_the_server():
    shared = {"coordinator_address": "127.0.0.1:9", "num_processes": 2}
    with pytest.raises(ConfigError, match="num_processes=2 needs dsjax-serve: LLM is one process"):
        LLM("dsjax-nano", progress=False, **shared)
    follower = EngineConfig(model="dsjax-nano", distributed=DistributedConfig(process_id=1, **shared))
    with pytest.raises(ConfigError, match="process_id=1 only follows process 0: start it as dsjax-serve"):
        Engine.from_config(follower)
