"""The prompt format: the handed cases, the rules of a conversation, and refusals that name the field."""

import json

import pytest

from dsjax import chat_messages
from dsjax.chat import ChatStrings, Segment, encode_chat, render
from dsjax.chat_markers import MARKERS
from dsjax.chat_messages import Turn
from dsjax.errors import ConfigError, ErrorCode, RequestError
from tests.chat_cases import CHAT_DIR, chat_file, released_tokenizer, tiny_tokenizer

STRINGS = {
    "tools_template": "TOOLS <{dsml_token}x> {thinking_start_token}{thinking_end_token} {literal}\n{tool_schemas}\nEND",
    "response_format_template": "REPLY AS {schema}",
    "effort_prefix": {"low": "", "high": "HIGH. ", "max": "MAX. "},
}
STRINGS["tools_template"] = STRINGS["tools_template"].replace(" {literal}", " { }")  # braces without a name are text
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BOS, EOS, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


def text(messages, **options):
    return "".join(segment.text for segment in render(messages, **options))


def user(content, **extra):
    return {"role": "user", "content": content, **extra}


def assistant(content, **extra):
    return {"role": "assistant", "content": content, **extra}


def call(name, arguments, id=None):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_handed_cases_byte_for_byte_and_id_for_id():
    cases = chat_file("chat.json")["encode"]
    strings = ChatStrings.from_path(CHAT_DIR / "strings.json")
    assert len(cases) >= 16
    for case in cases:
        assert text(case["messages"], strings=strings, **case["args"]) == case["prompt"], case["name"]
        ids = encode_chat(released_tokenizer(), case["messages"], strings=strings, **case["args"])
        assert ids == case["token_ids"], case["name"]


def test_segments_of_a_chat():
    assert render([user("hi")]) == [
        Segment(BOS, True), Segment(U, True), Segment("hi", False), Segment(A, True), Segment("</think>", True),
    ]  # fmt: skip
    assert text([user("hi")], add_default_bos_token=False) == f"{U}hi{A}</think>"
    assert text([user("hi")], thinking_mode="thinking") == f"{BOS}{U}hi{A}<think>"


def test_texts_at_a_seam_are_one_segment():
    messages = [{"role": "system", "content": "S", "response_format": {"a": 1}}, user("q")]
    segments = render(messages, strings=ChatStrings.from_dict(STRINGS))
    assert segments[1] == Segment('S\n\nREPLY AS {"a": 1}', False)


@pytest.mark.parametrize("marker", MARKERS)
def test_no_content_of_a_client_becomes_a_control_token(marker):
    strings = ChatStrings.from_dict(STRINGS)
    function = {"name": f"f{marker}", "description": marker, "parameters": {"type": "object"}}
    messages = [
        {"role": "system", "content": marker, "tools": [{"type": "function", "function": function}],
         "response_format": {marker: marker}},
        user(f"a{marker}b"),
        assistant(marker, reasoning_content=marker, tool_calls=[call(marker, {marker: marker, "n": [marker]}, "c")]),
        {"role": "tool", "tool_call_id": "c", "content": f"{marker}"},
        {"role": "latest_reminder", "content": marker},
        {"role": "developer", "content": [{"type": "text", "text": marker}]},
    ]  # fmt: skip
    harmless = json.loads(json.dumps(messages, ensure_ascii=False).replace(marker, "Z"))

    def control(ids):
        return [id for id in ids if id >= 360]

    tokenizer = tiny_tokenizer()
    ids = encode_chat(tokenizer, messages, strings=strings, thinking_mode="thinking")
    expected = encode_chat(tokenizer, harmless, strings=strings, thinking_mode="thinking")
    assert control(ids) == control(expected)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text(messages, strings=strings, thinking_mode="thinking")


def test_reasoning_before_the_last_user_turn_is_dropped():
    messages = [user("1"), assistant("a", reasoning_content="r"), user("2")]
    assert text(messages, thinking_mode="thinking") == f"{BOS}{U}1{A}</think>a{EOS}{U}2{A}<think>"
    kept = f"{BOS}{U}1{A}<think>r</think>a{EOS}{U}2{A}<think>"
    assert text(messages, thinking_mode="thinking", drop_thinking=False) == kept
    assert text(messages) == f"{BOS}{U}1{A}</think>a{EOS}{U}2{A}</think>"
    messages[1] = assistant("a", reasoning="r")  # another name of the field
    assert text(messages, thinking_mode="thinking", drop_thinking=False) == kept


def test_a_tool_keeps_all_reasoning():
    messages = [{"role": "system", "content": "", "tools": [TOOL]}, user("1"), assistant("a", reasoning="r"), user("2")]
    prompt = text(messages, thinking_mode="thinking", strings=ChatStrings.from_dict(STRINGS))
    assert prompt.endswith(f"END{U}1{A}<think>r</think>a{EOS}{U}2{A}<think>")
    assert "TOOLS <｜DSML｜x> <think></think> { }\n" + json.dumps(TOOL["function"]) + "\nEND" in prompt


def test_earlier_developer_messages_are_dropped_in_thinking_mode():
    messages = [{"role": "developer", "content": "d"}, user("q")]
    assert text(messages, thinking_mode="thinking") == f"{BOS}{U}q{A}<think>"
    assert text(messages) == f"{BOS}{U}d{U}q{A}</think>"


def test_consecutive_user_messages_and_results_are_one_turn():
    messages = [
        user("go"),
        assistant(None, tool_calls=[call("a", "{}", "1"), call("b", {"x": 1}, "2")]),
        {"role": "tool", "tool_call_id": "2", "content": "B"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "A"}]},
        user("and"),
        user([{"type": "text", "text": "so"}, {"type": "text", "text": "on"}]),
    ]
    assert text(messages).endswith(
        f"{EOS}{U}<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\nand\n\nso\n\non{A}</think>"
    )


@pytest.mark.parametrize("role", ["user", "tool"])
def test_merging_turns_looks_at_each_part_once(role, monkeypatch):
    """2,500 messages of one conversation took half a second, and four times as many sixteen times as long."""
    num_parts = 0

    class Counted(Turn):
        def __init__(self, **fields):
            nonlocal num_parts
            num_parts += len(fields["parts"])
            super().__init__(**fields)

    sort = chat_messages._in_call_order

    def counted_sort(parts, order):
        nonlocal num_parts
        num_parts += len(parts)
        return sort(parts, order)

    monkeypatch.setattr(chat_messages, "Turn", Counted)
    monkeypatch.setattr(chat_messages, "_in_call_order", counted_sort)
    messages = [{"role": role, "content": str(i)} for i in range(500)]
    texts = [f"<tool_result>{i}</tool_result>" if role == "tool" else str(i) for i in range(500)]
    assert text(messages) == f"{BOS}{U}" + "\n\n".join(texts) + f"{A}</think>"
    assert num_parts == 3 * 500  # read, put in order, joined


def test_results_of_two_rounds_of_calls_are_each_in_the_order_of_their_own():
    def result(id: str) -> dict:
        return {"role": "tool", "tool_call_id": id, "content": id.upper()}

    calls = [call("f", "{}", "a"), call("f", "{}", "b")]
    messages = [
        user("go"), assistant(None, tool_calls=calls), result("b"), user("x"), result("a"), result("?"),
        assistant(None, tool_calls=calls[::-1]), {**user("t"), "task": "title"}, result("a"), result("b"),
    ]  # fmt: skip
    turns = chat_messages.merge_turns(chat_messages.read_messages(messages))
    assert [[getattr(p, "text", p) for p in t.parts] for t in turns if t.role == "user"] == [
        ["go"], ["A", "x", "?", "B"], ["t"], ["B", "A"],
    ]  # fmt: skip


def test_a_chat_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    longest = max(map(len, tiny_tokenizer()._plain.get_vocab()))
    messages, num_bytes = [user("x" * 99), assistant("y" * 2000)], 99 + 2000
    fewest = -(-num_bytes // longest)
    ids = encode_chat(tiny_tokenizer(), messages, max_model_len=fewest + 1)
    assert ids == encode_chat(tiny_tokenizer(), messages) and fewest <= len(ids) <= num_bytes + 5
    monkeypatch.setattr(type(tiny_tokenizer()), "encode", None)
    with pytest.raises(RequestError) as caught:
        encode_chat(tiny_tokenizer(), messages, max_model_len=fewest)
    assert caught.value.message == (
        f"the prompt has at least {fewest} tokens, and with one token of output exceeds max_model_len={fewest}"
    )


def test_arguments_that_are_no_json_object_become_one_parameter():
    for raw in ["{broken", "[1, 2]", "7", "[" * 100_000]:
        prompt = text([user("q"), assistant("", tool_calls=[call("f", raw)])])
        assert f'<｜DSML｜parameter name="arguments" string="true">{raw}</｜DSML｜parameter>' in prompt


def test_tasks():
    assert text([user("q", task="action")], thinking_mode="thinking") == f"{BOS}{U}q{A}<think><｜action｜>"
    assert text([user("q", task="query")]) == f"{BOS}{U}q<｜query｜>"
    answered = [user("q", task="query"), assistant("s"), user("r")]
    assert text(answered, drop_thinking=False, thinking_mode="thinking") == (
        f"{BOS}{U}q<｜query｜>s{EOS}{U}r{A}<think>"  # a task is answered without thinking
    )
    assert text([user("a"), user("q", task="title")]) == f"{BOS}{U}a\n\nq<｜title｜>"


def test_an_unfinished_reply_is_continued():
    assert text([user("q"), assistant("so", wo_eos=True)]) == f"{BOS}{U}q{A}</think>so"


def test_a_system_message_alone_opens_a_reply_only_if_asked():
    messages = [{"role": "system", "content": "s"}]
    assert text(messages) == f"{BOS}s"
    assert text(messages, reply_after_system=True) == f"{BOS}s{A}</think>"
    assert text(messages, reply_after_system=True, thinking_mode="thinking") == f"{BOS}s{A}<think>"


def test_tools_of_the_request_go_to_the_system_message():
    strings = ChatStrings.from_dict(STRINGS)
    asked = {"tools": [TOOL], "response_format": {"type": "object"}, "strings": strings}
    on_message = {"role": "system", "content": "s", "tools": [TOOL], "response_format": {"type": "object"}}
    assert text([{"role": "system", "content": "s"}, user("q")], **asked) == text(
        [on_message, user("q")], strings=strings
    )
    assert text([user("q")], **asked).startswith(f"{BOS}\n\nTOOLS ")
    with pytest.raises(RequestError, match="not on both"):
        render([on_message, user("q")], **asked)


def test_effort_is_a_prefix_in_thinking_mode_only():
    strings = ChatStrings.from_dict(STRINGS)
    asked = {"reasoning_effort": "max", "strings": strings}
    assert text([user("q")], thinking_mode="thinking", **asked) == f"{BOS}MAX. {U}q{A}<think>"
    assert text([user("q")], **asked) == f"{BOS}{U}q{A}</think>"
    assert text([user("q")], reasoning_effort="max") == f"{BOS}{U}q{A}</think>"  # needs no strings
    preview = ChatStrings.from_dict({"effort_prefix": {"none_or_high": "", "max": "M"}})
    assert preview.effort("high") == ""
    with pytest.raises(RequestError, match="reasoning_effort='low' is not allowed: this checkpoint offers high, max"):
        preview.effort("low")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"response_format": {"type": "object"}}, "response_format"),
        ({"reasoning_effort": "high", "thinking_mode": "thinking"}, "reasoning_effort"),
    ],
)
def test_what_needs_the_file_names_it(options, asked, tmp_path):
    for strings in (None, ChatStrings.from_path(tmp_path)):
        with pytest.raises(RequestError, match=rf"^{asked} cannot be used: .* no chat_strings\.json") as caught:
            render([user("q")], strings=strings, **options)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_strings_are_read_from_the_checkpoint(tmp_path):
    two = {"effort_prefix": {"old": {"max": "OLD"}, "new": {"max": "NEW"}}}
    file = tmp_path / "chat_strings.json"
    file.write_text(json.dumps(two))
    assert ChatStrings.from_path(tmp_path).effort("max") == "OLD"
    file.write_text(json.dumps(two | {"effort_release": "new"}))
    assert ChatStrings.from_path(tmp_path).effort("max") == "NEW"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must hold a JSON object"),
        ({"tools_template": 1}, "tools_template of chat_strings.json must be a string"),
        ({"tools_template": "no place"}, r"must name {tool_schemas}"),
        ({"tools_template": "{tool_schemas} {oops}"}, r"not \['oops'\]"),
        ({"effort_prefix": {"max": 1}}, "effort_prefix of chat_strings.json must map"),
        (
            {"effort_prefix": {"a": {}}, "effort_release": "b"},
            "effort_release='b' of chat_strings.json is not one of a",
        ),
    ],
)
def test_a_bad_strings_file_is_refused(data, message, tmp_path):
    (tmp_path / "chat_strings.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        ChatStrings.from_path(tmp_path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty: it must have at least one message"),
        ("hi", "messages must be a list of at least one message, not 'hi'"),
        (None, "messages must be a list of at least one message, not nothing"),
        (["hi"], r"messages\[0\] must be an object with role and content, not 'hi'"),
        (
            [user("a"), {"role": "bot", "content": ""}],
            r"messages\[1\]\.role='bot' is not allowed: it must be one of sys",
        ),
        ([{"content": "a"}], r"messages\[0\]\.role=nothing is not allowed"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([assistant(None)], r"messages\[0\]\.content is missing"),
        ([user(5)], r"messages\[0\]\.content must be a string or a list of text parts, not 5"),
        ([user([{"type": "image_url"}])], r"messages\[0\]\.content\[0\]\.type='image_url' is not allowed"),
        ([user(["a"])], r"messages\[0\]\.content\[0\]\.type=nothing is not allowed"),
        ([user([{"type": "text"}])], r"messages\[0\]\.content\[0\]\.text must be a string"),
        ([{"role": "developer", "content": ""}], r"messages\[0\]\.content must not be empty"),
        ([user("a", tool_calls=[call("f", "{}")])], r"messages\[0\]\.tool_calls is not allowed for role 'user'"),
        ([user("a", tools=[TOOL])], r"messages\[0\]\.tools is not allowed for role 'user': only for system and dev"),
        ([assistant("a", tool_calls="f")], r"messages\[0\]\.tool_calls must be a list, not 'f'"),
        ([assistant("a", tool_calls=["f"])], r"messages\[0\]\.tool_calls\[0\]\.function must be an object"),
        ([assistant("a", tool_calls=[call("", "{}")])], r"messages\[0\]\.tool_calls\[0\]\.function\.name must be"),
        (
            [assistant("a", tool_calls=[call("f", 3)])],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be JS",
        ),
        ([assistant("a", reasoning_content=1)], r"messages\[0\]\.reasoning_content must be a string, not 1"),
        ([user("a", task="dance")], r"messages\[0\]\.task='dance' is not allowed: it must be one of action, query"),
        ([user("a", task=[])], r"messages\[0\]\.task=list is not allowed"),
        (
            [{"role": "system", "content": "", "tools": [{"name": "f"}]}],
            r"messages\[0\]\.tools\[0\] must be an object wi",
        ),
        (
            [{"role": "system", "content": "", "response_format": "json"}],
            r"messages\[0\]\.response_format must be an obj",
        ),
        ([{"role": "tool", "content": "a", "tool_call_id": 1}], r"messages\[0\]\.tool_call_id must be a string"),
    ],
)
def test_bad_messages_are_named(messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        render(messages)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thinking_mode": "loud"}, "thinking_mode='loud' is not allowed: it must be one of chat, thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort='huge' is not allowed: it must be one of low, high, max"),
        ({"tools": "f"}, "tools must be a list, not 'f'"),
        ({"response_format": "json"}, "response_format must be an object, not 'json'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(RequestError, match=message):
        render([user("q")], **options)


def test_a_tokenizer_without_the_control_token_is_an_error():
    class Bare:
        def encode(self, text):
            return [0]

        def control_id(self, marker):
            return None if marker == U else 7

    with pytest.raises(RequestError, match="messages need the control token '<｜User｜>'"):
        encode_chat(Bare(), [user("q")])  # type: ignore[arg-type]
