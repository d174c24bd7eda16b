"""Generate over a real channel: texts, ids, counts, stops and refusals."""

import asyncio
import re

import pytest

from dsjax.errors import invalid
from dsjax.request import MAX_LOGPROBS
from servers import prompts
from servers.proto.dsjax.v1 import inference_pb2 as pb
from tests.servers.fakes import EOS_ID, FakeEngine, FakeTokenizer
from tests.servers.harness import Harness, collect, request, run, status


def test_unary_is_one_message_with_text_ids_and_usage():
    async def test(h: Harness):
        messages = await collect(h.stub.Generate(request("abc", stream=False, id="x", max_tokens=5)))
        assert messages == [
            pb.GenerateResponse(
                request_id="x",
                outputs=[
                    pb.Output(
                        text="defgh",
                        token_ids=[100, 101, 102, 103, 104],
                        finish_reason=pb.FINISH_REASON_LENGTH,
                        completion_tokens=5,
                    )
                ],
                usage=pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=5),
            )
        ]

    run(test, FakeEngine(num_cached=2))


@pytest.mark.parametrize("interval", [1, 4])
def test_streamed_text_is_unary_text_is_decode_of_ids(interval):
    async def test(h: Harness):
        for length in range(1, 26):
            prompt = [200 - 7 * length, 185 + length]  # runs through multi-byte, invalid and control bytes
            params = {"max_tokens": 3 * length, "ignore_eos": True}
            unary = (await collect(h.stub.Generate(request(prompt, stream=False, **params))))[0].outputs[0]
            message = request(prompt, **params)
            message.stream_interval = interval
            streamed = [m.outputs[0] for m in await collect(h.stub.Generate(message))]
            ids = [i for output in streamed for i in output.token_ids]
            assert ids == list(unary.token_ids) == [(prompt[-1] + 1 + i) % 256 for i in range(3 * length)]
            decoded = (await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
            assert "".join(output.text for output in streamed) == unary.text == decoded
            assert all(len(output.token_ids) >= interval for output in streamed[1:-1])
            assert [output.finish_reason for output in streamed[:-1]] == [0] * (len(streamed) - 1)

    run(test)


def test_streams_that_share_messages_say_the_same():
    async def one(h: Harness, number: int):
        length = 1 + number % 7
        messages = await collect(h.stub.Generate(request([number, number], max_tokens=length, ignore_eos=True, n=2)))
        for index in (0, 1):
            outputs = [o for m in messages for o in m.outputs if o.index == index]
            assert [i for o in outputs for i in o.token_ids] == [(number + 1 + i) % 256 for i in range(length)]
            assert [o.finish_reason for o in outputs][-1] == pb.FINISH_REASON_LENGTH
            assert outputs[-1].completion_tokens == length

    async def test(h: Harness):
        await asyncio.gather(*(one(h, number) for number in range(100)))
        await h.idle()

    run(test, FakeEngine(max_num_seqs=30, max_num_waiting=100), max_messages_per_s=1)


def test_n_answers_in_one_unary_message_and_counted_together():
    async def test(h: Harness):
        (message,) = await collect(h.stub.Generate(request("abc", stream=False, n=3, max_tokens=2)))
        assert [(o.index, o.text, o.completion_tokens) for o in message.outputs] == [(i, "de", 2) for i in range(3)]
        assert message.usage.completion_tokens == 6
        streamed = await collect(h.stub.Generate(request("abc", n=3, max_tokens=2)))
        texts = {i: "".join(o.text for m in streamed for o in m.outputs if o.index == i) for i in range(3)}
        assert texts == {0: "de", 1: "de", 2: "de"}
        assert streamed[-1].usage.completion_tokens == 6

    run(test)


@pytest.mark.parametrize(
    ("params", "text", "stop"),
    [
        ({"stop": ["h"]}, "defg", "h"),
        ({"stop": ["gh"]}, "def", "gh"),
        ({"stop": ["fgh"]}, "de", "fgh"),
        ({"stop": ["d"]}, "", "d"),
        ({"stop": ["fg", "fgh"]}, "de", "fg"),
        ({"stop": ["fgx"]}, "defghijk", None),
        ({"stop": ["fgh"], "include_stop_str_in_output": True}, "defgh", "fgh"),
        ({"stop": ["e"], "min_tokens": 4}, "defghijk", None),
        ({"stop_token_ids": [ord("g")]}, "defg", ord("g")),
        ({"stop_token_ids": [ord("g")], "min_tokens": 5}, "defghijk", None),
    ],
)
def test_stops_never_leak(params, text, stop):
    async def test(h: Harness):
        for stream in (False, True):
            messages = await collect(h.stub.Generate(request("abc", stream=stream, max_tokens=8, **params)))
            assert "".join(m.outputs[0].text for m in messages) == text
            last = messages[-1].outputs[0]
            which = last.WhichOneof("matched_stop")
            assert (getattr(last, which) if which else None) == stop
            assert last.finish_reason == (pb.FINISH_REASON_LENGTH if stop is None else pb.FINISH_REASON_STOP)

    run(test)


def test_end_token_first_and_ignored():
    async def test(h: Harness):
        (message,) = await collect(h.stub.Generate(request([EOS_ID - 1], stream=False, max_tokens=4)))
        output = message.outputs[0]
        assert list(output.token_ids) == [EOS_ID]
        assert (output.finish_reason, output.stop_token_id) == (pb.FINISH_REASON_STOP, EOS_ID)
        (message,) = await collect(h.stub.Generate(request([9], stream=False, max_tokens=4, ignore_eos=True)))
        assert list(message.outputs[0].token_ids) == [10, 11, 12, 13]
        (message,) = await collect(h.stub.Generate(request([9], stream=False, max_tokens=4, min_tokens=2)))
        assert list(message.outputs[0].token_ids) == [10, 11, 12, 13]

    run(test)


def test_logprobs_and_prompt_logprobs():
    async def test(h: Harness):
        message = request("ab", max_tokens=9, logprobs=1, prompt_logprobs=2)
        first, *rest = await collect(h.stub.Generate(message))
        assert first.prompt_logprobs == pb.PromptLogprobs(
            positions=[
                pb.TokenLogprobs(token_id=97),
                pb.TokenLogprobs(token_id=98, logprob=-0.5, rank=1, top_token_ids=[98, 99], top_logprobs=[-0.5, -1.5]),
            ]
        )
        assert not first.prompt_logprobs.positions[0].HasField("logprob")
        assert not any(message.HasField("prompt_logprobs") for message in rest)
        assert [entry for message in (first, *rest) for entry in message.outputs[0].logprobs] == [
            pb.TokenLogprobs(token_id=i, logprob=-0.5, rank=1, top_token_ids=[i], top_logprobs=[-0.5])
            for i in range(99, 108)
        ]

    run(test)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request(""), "empty"),
        (request([]), "empty"),
        (pb.GenerateRequest(), "prompt is absent: set text, token_ids or chat"),
        (request(max_tokens=0), "max_tokens=0 is not allowed: it must be 1 or more"),
        (request(min_tokens=5, max_tokens=4), "min_tokens=5 is not allowed: it must be at most max_tokens=4"),
        (request(temperature=-1), "temperature=-1.0"),
        (request(top_p=float("nan")), "top_p=nan is not allowed"),
        (request(n=0), "n=0 is not allowed"),
        (request(logprobs=MAX_LOGPROBS + 1), "logprobs=21 is not allowed"),
        (request(stop=[""]), "a stop string must not be empty"),
        (request([1] * 32), "the prompt has 32 tokens: with an answer it must fit into max_model_len=32"),
        (request([1] * 33), "the prompt has 33 tokens"),
        (request(id="x" * 257), "request_id has 257 characters: at most 256 are allowed"),
    ],
)
def test_a_bad_request_is_one_sentence_and_the_server_goes_on(message, words):
    async def test(h: Harness):
        code, details = await status(collect(h.stub.Generate(message)))
        assert code == "INVALID_ARGUMENT" and words in details
        assert (await collect(h.stub.Generate(request("a", max_tokens=1))))[0].outputs[0].text == "b"
        await h.idle()

    run(test, FakeEngine(max_model_len=32))


def test_lengths_around_max_model_len():
    async def test(h: Harness):
        (message,) = await collect(h.stub.Generate(request([65] * 31, stream=False)))
        assert (message.outputs[0].text, message.outputs[0].finish_reason) == ("B", pb.FINISH_REASON_LENGTH)
        (message,) = await collect(h.stub.Generate(request([65] * 30, stream=False)))
        assert message.outputs[0].text == "BC"
        (message,) = await collect(h.stub.Generate(request([65], stream=False)))
        assert message.usage.completion_tokens == 31

    run(test, FakeEngine(max_model_len=32))


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "encode", None)
    monkeypatch.setattr(prompts, "encode_chat", None)  # nor are the messages of a chat read
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 60)])

    async def test(h: Harness):
        for prompt in ({"text": "x" * 32}, {"chat": chat}):
            code, details = await status(collect(h.stub.Generate(pb.GenerateRequest(**prompt))))
            assert code == "INVALID_ARGUMENT"
            assert re.fullmatch(r"the prompt has at least \d+ tokens, .* exceeds max_model_len=32", details)
        await h.idle()

    run(test, FakeEngine(max_model_len=32))


def test_a_stream_interval_of_zero_is_refused():
    async def test(h: Harness):
        message = request()
        message.stream_interval = 0
        assert (await status(collect(h.stub.Generate(message))))[0] == "INVALID_ARGUMENT"

    run(test)


def test_unknown_fields_of_a_newer_client_are_ignored():
    async def test(h: Harness):
        raw = request("a", stream=False, max_tokens=1).SerializeToString() + b"\xfa\x7f\x03new"  # field 2047
        call = h.channel.unary_stream(
            "/dsjax.v1.Inference/Generate",
            request_serializer=bytes,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        assert [m.outputs[0].text async for m in call(raw)] == ["b"]

    run(test)


def test_an_absent_request_id_is_made_and_told_before_the_first_token():
    async def test(h: Harness):
        h.engine.gate.clear()
        call = h.stub.Generate(request("a", max_tokens=1))
        metadata = dict(await call.initial_metadata())
        h.engine.gate.set()
        (message,) = await collect(call)
        assert message.request_id == metadata["x-request-id"] != ""

    run(test)


def test_a_server_without_tokenizer_takes_ids_only():
    engine = FakeEngine()

    async def test(h: Harness):
        engine.tokenizer = None
        code, details = await status(collect(h.stub.Generate(request("abc"))))
        assert code == "INVALID_ARGUMENT" and "send token_ids, or set --tokenizer" in details

    run(test, engine)


def test_a_long_error_keeps_its_end_where_the_reason_is():
    async def test(h: Harness):
        h.engine.raise_in_add = invalid(f"it={'é' * 3000} is not allowed: the reason")
        details = (await status(collect(h.stub.Generate(request()))))[1]
        assert details.startswith("it=éé") and details.endswith("éé is not allowed: the reason")
        assert len(details.encode()) < 2100

    run(test)
