"""Replies read back: strictly, leniently, and the same at every split of the text."""

import json
import random

import pytest

from dsjax.chat import ChatStrings, ParseError, ReplyDelta, ReplyParser, ToolCall, parse, parse_strict, render
from dsjax.chat_markers import EOS, MARKERS
from tests.chat_cases import chat_file

D = "｜DSML｜"
END = f"</{D}tool_calls>"


def invoke(name, *parameters):
    body = "\n".join(f"<{D}parameter {head}>{value}</{D}parameter>" for head, value in parameters)
    return f'<{D}invoke name="{name}">\n{body}\n</{D}invoke>'


def block(*invokes, name="tool_calls", before="\n\n"):
    return f"{before}<{D}{name}>\n" + "\n".join(invokes) + f"\n</{D}{name}>"


CALL = invoke("f", ('name="s" string="true"', 'a"b\n<c>'), ('name="n" string="false"', "5"))
ARGUMENTS = '{"s": "a\\"b\\n<c>", "n": 5}'


def streamed(text, mode, size, **options):
    """What `parse` returns, from pieces of `size` characters; also checks that no delta holds a marker."""
    parser = ReplyParser(mode, **options)
    deltas = [parser.feed(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    return {
        "role": "assistant",
        "content": "".join(delta.content for delta in deltas),
        "reasoning_content": "".join(delta.reasoning for delta in deltas),
        "tool_calls": [call.to_openai() for call in calls],
    }


def message(content="", reasoning="", *calls):
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": args}} for name, args in calls]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}


def check(text, mode, expected, **options):
    assert parse(text, mode, **options) == expected
    for size in (1, 2, 3, 5, 7):
        assert streamed(text, mode, size, **options) == expected
    for cut in range(len(text) + 1):
        parser = ReplyParser(mode, **options)
        deltas = (parser.feed(text[:cut]), parser.feed(text[cut:]), parser.finish())
        assert "".join(delta.content for delta in deltas) == expected["content"]
        assert "".join(delta.reasoning for delta in deltas) == expected["reasoning_content"]


def test_handed_cases():
    cases = chat_file("chat.json")["parse"]
    assert len(cases) >= 5
    for case in cases:
        if "error" in case:
            with pytest.raises(ParseError) as caught:
                parse_strict(case["completion"], case["thinking_mode"])
            assert str(caught.value) in case["error"]
        else:
            assert parse_strict(case["completion"], case["thinking_mode"]) == case["parsed"]
            check(case["completion"], case["thinking_mode"], case["parsed"])


WELL_FORMED = [
    ("Hi.", "chat", message("Hi.")),
    ("r</think>c", "thinking", message("c", "r")),
    ("</think>", "thinking", message()),
    (f"r</think>c{block(CALL)}", "thinking", message("c", "r", ("f", ARGUMENTS))),
    (f"c\n{block(CALL, invoke('g'))}", "chat", message("c\n", "", ("f", ARGUMENTS), ("g", "{}"))),
    ("a < b\n\n<b> ｜ </", "chat", message("a < b\n\n<b> ｜ </")),
    (block(invoke("f", ('name="v" string="true"', f"</{D}invoke>\n{END}"))), "chat",
     message("", "", ("f", json.dumps({"v": f"</{D}invoke>\n{END}"}, ensure_ascii=False)))),
    (block(invoke("f", ('name="v" string="true"', "x" * 9000))), "chat",
     message("", "", ("f", json.dumps({"v": "x" * 9000})))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mode", "expected"), WELL_FORMED)
def test_a_well_formed_reply_reads_the_same_both_ways(text, mode, expected):
    assert parse_strict(text + EOS, mode) == expected
    if len(text) < 1000:
        check(text, mode, expected)
        check(text + EOS + "after", mode, expected)
    else:
        assert parse(text, mode) == streamed(text, mode, 7) == expected


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("never closed", "thinking", message("", "never closed")),
        ("never closed</thi", "thinking", message("", "never closed</thi")),
        (f"r{block(CALL)}", "thinking", message("", "r", ("f", ARGUMENTS))),
        ("a</think>b", "chat", message("ab")),
        ("<think>r</think>c", "chat", message("c", "r")),
        ("<think>r</think>c<think>d", "thinking", message("cd", "r")),
        (f"c{block(CALL)}\n\nmore", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c{block(CALL, name='toolcalls')}", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c{block(CALL, name='tool', before='')}", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c{block(CALL, before=chr(10))}", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c\n\n{CALL}", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c{block(CALL.replace(f'</{D}invoke>', ''), CALL)}", "chat",
         message("c", "", ("f", ARGUMENTS), ("f", ARGUMENTS))),
        (f"c{block(CALL)[: -len(END) - 1]}", "chat", message("c", "", ("f", ARGUMENTS))),
        (f"c{block(CALL)[:-45]}", "chat", message("c")),
        (f"c\n\n<{D}tool_ca", "chat", message("c")),
        ("c\n\n", "chat", message("c\n\n")),
        (f"c{D}d<{D}x>e</{D}y>", "chat", message("cd<x>e</y>")),
        (block(invoke("f", ('name="v"', "[1]"))), "chat", message("", "", ("f", '{"v": [1]}'))),
        (block(invoke("f", ('name="v"', "x y"))), "chat", message("", "", ("f", '{"v": "x y"}'))),
        (block(invoke("f", ('name="v" string="false"', "{oops"))), "chat", message("", "", ("f", '{"v": "{oops"}'))),
        (block(invoke("f", ('name="v" string="false"', "NaN"))), "chat", message("", "", ("f", '{"v": "NaN"}'))),
        (block(invoke("f", ('name="v" string="false"', " 1.10 "))), "chat", message("", "", ("f", '{"v": 1.10}'))),
        (block(f"<{D}invoke wrong>\n</{D}invoke>", CALL), "chat", message("", "", ("f", ARGUMENTS))),
    ],
)  # fmt: skip
def test_a_malformed_reply_is_read_leniently(text, mode, expected):
    check(text, mode, expected)


def test_a_call_comes_when_its_end_tag_has_come():
    parser = ReplyParser("chat")
    text = "c" + block(CALL, CALL)
    first = text.index(f"</{D}invoke>") + len(f"</{D}invoke>")
    assert parser.feed(text[: first - 1]) == ReplyDelta(content="c")
    assert parser.feed(text[first - 1 : first]).tool_calls == (ToolCall(index=0, name="f", arguments=ARGUMENTS),)
    assert parser.feed(text[first:]).tool_calls == (ToolCall(index=1, name="f", arguments=ARGUMENTS),)
    assert not parser.feed("more") and not parser.finish()


def test_text_is_not_held_longer_than_it_may_be_a_marker():
    parser = ReplyParser("chat")
    assert parser.feed("a <") == ReplyDelta(content="a ")
    assert parser.feed("b") == ReplyDelta(content="<b")
    assert parser.feed("\n\n") == ReplyDelta()
    assert parser.feed("\n") == ReplyDelta(content="\n")
    assert parser.finish() == ReplyDelta(content="\n\n")


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
def test_a_wrapper_the_schema_does_not_know_is_taken_off(wrapper):
    def tools(*names):
        properties = {name: {} for name in names}
        return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]

    for string, value in (("false", '{"a": 1}'), ("true", '{"a": 1}')):
        text = block(invoke("f", (f'name="{wrapper}" string="{string}"', value)))
        check(text, "chat", message("", "", ("f", '{"a": 1}')), tools=tools("a"))
        kept = json.dumps({wrapper: {"a": 1} if string == "false" else value})
        check(text, "chat", message("", "", ("f", kept)), tools=tools(wrapper))
        check(text, "chat", message("", "", ("f", kept)))


def test_random_replies_never_leak_a_marker_and_never_depend_on_the_split():
    rng = random.Random(0)
    pieces = [*MARKERS, "\n", "\n\n", "<", "｜", "</", "text ", '">', f"<{D}", f"</{D}", "tool_calls>", "invoke",
              " name=", '"f"', ">", f"<{D}tool_calls>", f'<{D}invoke name="f">',
              f'<{D}parameter name="a">', f"</{D}parameter>", f"</{D}invoke>", END]  # fmt: skip
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 14)))
        for mode in ("chat", "thinking"):
            whole = parse(text, mode)
            assert streamed(text, mode, 1) == streamed(text, mode, 3) == whole
            for marker in MARKERS:
                assert marker not in whole["content"]
                assert marker not in whole["reasoning_content"]


def test_a_tag_that_never_ends_stops_the_search():
    text = f'c\n\n<{D}tool_calls>\n<{D}invoke name="' + "x" * 10_000
    assert parse(text, "chat") == streamed(text, "chat", 100) == message("c")


def test_a_huge_value_is_read_in_linear_time():
    value = "\n<" * 100_000
    text = block(invoke("f", ('name="v" string="true"', value)))
    assert json.loads(parse(text, "chat")["tool_calls"][0]["function"]["arguments"]) == {"v": value}
    assert parse("</think>" * 50_000, "chat") == message()


def test_a_rendered_reply_parses_back():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"s": "x\\n", "n": [1, null], "e": ""}'}}
    reply = message("c", "r") | {"tool_calls": [call]}
    segments = render(
        [{"role": "user", "content": "q"}, reply],
        thinking_mode="thinking",
        add_default_bos_token=False,
        strings=ChatStrings(),
    )
    completion = "".join(segment.text for segment in segments[4:])
    assert parse_strict(completion, "thinking") == reply
    check(completion, "thinking", reply)


@pytest.mark.parametrize(
    ("text", "mode", "error"),
    [
        ("r", "thinking", "missing </think>"),
        (f"r{block(CALL)}</think>{EOS}", "thinking", "missing </think>"),
        ("c", "chat", "missing EOS"),
        (f"c{EOS}more", "chat", "Unexpected content at end"),
        (f"c{block(CALL)}more{EOS}", "chat", "Unexpected content at end"),
        (f"a</think>b{EOS}", "chat", "Unexpected special token '</think>' in content"),
        (f"c{block(CALL)[: -len(END)]}{EOS}", "chat", "Tool call format error"),
        (f"c{block('')}{EOS}", "chat", "Tool call format error"),
        (
            block(invoke("f", ('name="a"', "x"), ('name="b" string="true"', "y"))) + EOS,
            "chat",
            "Parameter format error",
        ),
        (block(invoke("f", *[('name="a" string="true"', "x")] * 2)) + EOS, "chat", "Duplicate parameter name: 'a'"),
        (block(CALL).replace(f"</{D}parameter>", "") + EOS, "chat", "Parameter format error"),
    ],
)
def test_strict_refuses_what_the_release_refuses(text, mode, error):
    with pytest.raises(ParseError, match=error):
        parse_strict(text, mode)
