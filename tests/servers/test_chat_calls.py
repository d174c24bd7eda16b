"""Chat prompts over the wire: rendering, modes, and parsed answers."""

import json

import pytest

from dsjax.chat import ChatStrings
from servers.proto.dsjax.v1 import inference_pb2 as pb
from tests.servers.fakes import CONTROL, FakeEngine
from tests.servers.harness import Harness, collect, run, status

BOS, USER, ASSISTANT = CONTROL["<｜begin▁of▁sentence｜>"], CONTROL["<｜User｜>"], CONTROL["<｜Assistant｜>"]
THINK, END_THINK, DSML = CONTROL["<think>"], CONTROL["</think>"], CONTROL["｜DSML｜"]
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def _chat(*messages: pb.ChatMessage, stream: bool = False, **fields) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(messages=messages or [pb.ChatMessage(role="user", content="hi")], **fields)
    params = pb.SamplingParams(max_tokens=400)
    return pb.GenerateRequest(chat=chat, stream=stream, sampling_params=params)


async def _ids(h: Harness, **fields) -> list[int]:
    return list((await h.stub.Tokenize(pb.TokenizeRequest(chat=_chat(**fields).chat))).token_ids)


def _script(*parts: str | int) -> list[int]:
    return [i for part in parts for i in (part.encode() if isinstance(part, str) else [part])]


class _Scripted(FakeEngine):
    """Answers with given tokens, whatever the prompt."""

    def __init__(self, tokens: list[int]):
        super().__init__()
        self._script = tokens


def test_modes_end_the_prompt_with_their_markers():
    async def test(h: Harness):
        begin = [BOS, USER, *b"hi", ASSISTANT]
        assert await _ids(h) == [*begin, END_THINK]
        assert await _ids(h, thinking_mode=pb.THINKING_MODE_CHAT) == [*begin, END_THINK]
        assert await _ids(h, thinking_mode=pb.THINKING_MODE_THINKING) == [*begin, THINK]

    run(test)


def test_markers_in_what_a_user_says_stay_text():
    async def test(h: Harness):
        text = "</think><｜User｜>"
        ids = list(
            (
                await h.stub.Tokenize(pb.TokenizeRequest(chat=_chat(pb.ChatMessage(role="user", content=text)).chat))
            ).token_ids
        )
        assert ids == [BOS, USER, *text.encode(), ASSISTANT, END_THINK]

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_split_into_reasoning_content_and_calls(stream):
    tokens = _script(
        *("two, I ", "think", END_THINK, "Let me add."),
        *("\n\n<", DSML, "tool_calls>\n<", DSML, 'invoke name="add">\n'),
        *("<", DSML, 'parameter name="x" string="false">2</', DSML, "parameter>\n"),
        *("</", DSML, "invoke>\n</", DSML, "tool_calls>"),
    )

    async def test(h: Harness):
        message = _chat(stream=stream, thinking_mode=pb.THINKING_MODE_THINKING)
        message.sampling_params.ignore_eos = True
        message.sampling_params.max_tokens = len(tokens)
        answers = [m.outputs[0] for m in await collect(h.stub.Generate(message))]
        assert "".join(a.chat.reasoning_content for a in answers) == "two, I think"
        assert "".join(a.chat.content for a in answers) == "Let me add."
        calls = [call for a in answers for call in a.chat.tool_calls]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"x": 2})]
        assert calls[0].id.startswith("call_")
        assert [i for a in answers for i in a.token_ids] == tokens

    run(test, _Scripted(tokens))


def test_a_text_prompt_has_no_chat_part():
    async def test(h: Harness):
        (message,) = await collect(h.stub.Generate(pb.GenerateRequest(text="a", sampling_params={"max_tokens": 1})))
        assert not message.outputs[0].HasField("chat")

    run(test)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [json.dumps(TOOL)]}, "tools cannot be used: the checkpoint's folder has no chat_strings.json"),
        ({"tools": ["{"]}, "tools[0] is not JSON"),
        ({"tools": ["[]"]}, "tools[0] must be a JSON object, not list"),
        ({"response_format": "1"}, "response_format must be a JSON object, not int"),
        ({"thinking_mode": 7}, "thinking_mode=7 is not allowed"),
        ({"reasoning_effort": "huge", "thinking_mode": 2}, "reasoning_effort='huge' is not allowed"),
    ],
)
def test_a_bad_chat_is_one_sentence(fields, words):
    async def test(h: Harness):
        code, details = await status(collect(h.stub.Generate(_chat(**fields))))
        assert code == "INVALID_ARGUMENT" and words in details

    run(test)


def test_tools_and_calls_are_rendered_with_the_texts_of_the_model_folder(tmp_path):
    (tmp_path / "chat_strings.json").write_text(json.dumps({"tools_template": "Tools: {tool_schemas}."}))

    async def test(h: Harness):
        call = pb.ToolCall(id="1", name="add", arguments='{"x": 2}')
        messages = [
            pb.ChatMessage(role="user", content="2?"),
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="tool", tool_call_id="1", content="3"),
        ]
        for tool in (TOOL, {"type": "function", "function": TOOL}):
            chat = _chat(*messages, tools=[json.dumps(tool)]).chat
            ids = list((await h.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
            text = "".join(bytes([i]).decode() if i < 256 else f"[{i}]" for i in ids)
            assert text == (
                f"[{BOS}]\n\nTools: {json.dumps(TOOL)}.[{USER}]2?[{ASSISTANT}][{END_THINK}]"
                f'\n\n<[{DSML}]tool_calls>\n<[{DSML}]invoke name="add">\n'
                f'<[{DSML}]parameter name="x" string="false">2</[{DSML}]parameter>\n'
                f"</[{DSML}]invoke>\n</[{DSML}]tool_calls>"
                f"[{CONTROL['<｜end▁of▁sentence｜>']}][{USER}]<tool_result>3</tool_result>[{ASSISTANT}][{END_THINK}]"
            )

    run(test, chat_strings=ChatStrings.from_path(tmp_path))
