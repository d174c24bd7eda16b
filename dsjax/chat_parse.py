"""Reads a model's reply: reasoning, content and tool calls.  [no jax]

`parse_strict` is the release's parser, for data that must be well formed. `ReplyParser` is what a server needs: it
takes text in any pieces and makes the best of a reply that is cut off or malformed; `parse` is the same over a whole
text. Neither lets a control token into reasoning or content. Text arrives without a token's identity, so the texts of
control tokens are always read as control tokens. States of `ReplyParser`:

    reasoning --</think>--> content --tool block--> block <--> invoke <--> parameter;  block --end tag--> done
    reasoning --tool block--> block (the reasoning was not closed);  any --EOS--> done (the rest is dropped)
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsjax.chat_markers import BOS, DSML, EOS, MARKERS, THINK_END, THINK_START


class ParseError(ValueError):
    """A reply that is not in the release's format."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object as text."""

    index: int
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True)
class ReplyDelta:
    """What one `feed` added."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


# The block has other names in the wild, and its first line is sometimes left out. Blank lines before it belong to it.
_BLOCK_NAMES = ("tool_calls", "toolcalls", "tool")
_BLOCK_STARTS = tuple(
    newlines + tag
    for newlines in ("\n\n", "\n", "")
    for tag in (*(f"<{DSML}{name}>" for name in _BLOCK_NAMES), f"<{DSML}invoke ")
)
_LITERALS = (*_BLOCK_STARTS, *MARKERS)  # none is the beginning of another
_FIRST_CHARS = re.compile(r"[\n<｜]")
_BLOCK_EVENT = re.compile(f"<{DSML}invoke(?=[ \n])|</{DSML}(?:{'|'.join(_BLOCK_NAMES)})>|{EOS}")
_INVOKE_EVENT = re.compile(f"<{DSML}parameter(?=[ \n])|</{DSML}invoke>|{_BLOCK_EVENT.pattern}")
_PARAMETER_EVENT = re.compile(f"</{DSML}parameter>|{EOS}")
_LONGEST_EVENT = max(len(EOS), len(f"</{DSML}tool_calls>"), len(f"<{DSML}parameter") + 1)
_LONGEST_HEADER = 4096
_PIECE = 4096  # a long text is worked off in pieces, because every marker copies the rest of the buffer
_HEADER_END = re.compile(r'((?:[^">]|"[^"]*")*)>')
_NAME = re.compile(r'\sname="([^"]*)"')
_STRING = re.compile(r'\sstring="?(true|false)"?')


class ReplyParser:
    """Splits a reply that arrives in pieces; how it is cut never changes the sum of the deltas.

    A tool call is given out whole, when its end tag has come; one that is cut off is not given out. `tools` are
    OpenAI's, and are used to unwrap a parameter `arguments` or `input` that holds the real object.
    """

    def __init__(self, thinking_mode: str, *, tools: Sequence[Any] | None = None):
        self._state = "reasoning" if thinking_mode == "thinking" else "content"
        self._tools = tools or ()
        self._buffer = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._has_content = False
        self._calls: list[ToolCall] = []
        self._num_calls = 0
        self._name: str | None = None  # of the invoke being read; None: it has none, so it is dropped
        self._parameters: dict[str, str] = {}  # name to value as JSON text
        self._parameter: tuple[str, str | None] = ("", None)  # name and `string` attribute of the one being read
        self._value: list[str] = []  # its value so far

    def feed(self, text: str) -> ReplyDelta:
        """Takes the next piece of the reply."""
        for start in range(0, len(text), _PIECE):
            if self._state == "done":
                break
            self._buffer += text[start : start + _PIECE]
            self._run(final=False)
        return self._take()

    def finish(self) -> ReplyDelta:
        """The reply has ended: gives out what was held back as a possible marker."""
        if self._state != "done":
            self._run(final=True)
        self._state = "done"
        return self._take()

    def _take(self) -> ReplyDelta:
        delta = ReplyDelta(
            reasoning="".join(self._reasoning), content="".join(self._content), tool_calls=tuple(self._calls)
        )
        self._reasoning.clear()
        self._content.clear()
        self._calls.clear()
        return delta

    def _run(self, final: bool) -> None:
        steps = {"block": self._block, "invoke": self._invoke, "parameter": self._read_parameter}
        while self._state != "done":
            step = steps.get(self._state)
            if not (step() if step else self._text(final)):
                return

    def _goto(self, state: str, consumed: int) -> bool:
        self._state = state
        self._buffer = "" if state == "done" else self._buffer[consumed:]
        return True

    # --- reasoning and content --------------------------------------------------------------

    def _text(self, final: bool) -> bool:
        """Gives out text up to the next marker and acts on it; False if more text is needed."""
        buffer, start, at = self._buffer, 0, 0
        while candidate := _FIRST_CHARS.search(buffer, at):
            at = candidate.start()
            marker = next((literal for literal in _LITERALS if buffer.startswith(literal, at)), None)
            if marker is not None:
                self._emit(buffer[start:at])
                return self._marker(marker, at)
            rest = buffer[at : at + max(map(len, _LITERALS))]
            if at + len(rest) == len(buffer) and any(literal.startswith(rest) for literal in _LITERALS):
                if not final:
                    break
                if DSML in rest:  # a block cut off in its first tag
                    self._emit(buffer[start:at])
                    return self._goto("done", 0)
            at += 1
        else:
            at = len(buffer)
        self._emit(buffer[start:at])
        self._buffer = buffer[at:]
        return False

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._state == "reasoning":
            self._reasoning.append(text)
        else:
            self._content.append(text)
            self._has_content = True

    def _marker(self, marker: str, at: int) -> bool:
        end = at + len(marker)
        if marker == EOS:
            return self._goto("done", end)
        if marker in _BLOCK_STARTS:
            is_bare_invoke = marker.endswith("invoke ")
            return self._goto("block", at + marker.index("<") if is_bare_invoke else end)
        if marker == THINK_END and self._state == "reasoning":
            return self._goto("content", end)
        if marker == THINK_START and not self._has_content:
            return self._goto("reasoning", end)
        return self._goto(self._state, end)  # any other marker is swallowed

    # --- the tool block ---------------------------------------------------------------------

    def _event(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The next tag of interest. The buffer keeps only what may still belong to one, so its search stays short."""
        event = pattern.search(self._buffer)
        if event is None and len(self._buffer) > _LONGEST_EVENT:
            if self._state == "parameter":
                self._value.append(self._buffer[:-_LONGEST_EVENT])
            self._buffer = self._buffer[-_LONGEST_EVENT:]
        return event

    def _header(self, event: re.Match[str]) -> tuple[str, int] | None:
        """Attributes of the tag begun at `event` and the offset after it; None if it is not complete."""
        header = _HEADER_END.match(self._buffer, event.end(), event.end() + _LONGEST_HEADER)
        if header is not None:
            return header[1], header.end()
        if len(self._buffer) >= event.end() + _LONGEST_HEADER:
            self._goto("done", 0)  # no tag at all: what follows cannot be told apart
        return None

    def _block(self) -> bool:
        event = self._event(_BLOCK_EVENT)
        if event is None:
            return False
        if event[0].endswith("invoke"):
            return self._start_invoke(event)
        return self._goto("done", event.end())

    def _start_invoke(self, event: re.Match[str]) -> bool:
        header = self._header(event)
        if header is None:
            return False
        name = _NAME.search(header[0])
        self._name = name[1] if name else None
        self._parameters = {}
        return self._goto("invoke", header[1])

    def _invoke(self) -> bool:
        event = self._event(_INVOKE_EVENT)
        if event is None:
            return False
        tag = event[0]
        if tag.endswith("parameter"):
            header = self._header(event)
            if header is None:
                return False
            name, string = _NAME.search(header[0]), _STRING.search(header[0])
            self._parameter = (name[1] if name else "", string[1] if string else None)
            self._value.clear()
            return self._goto("parameter", header[1])
        if tag == EOS:
            return self._goto("done", 0)
        if tag.startswith("</"):
            self._end_invoke()
            return self._goto("block", event.end() if tag.endswith("invoke>") else event.start())
        if self._header(event) is None:
            return False
        self._end_invoke()  # the next call begins, so this one is over though its end tag is missing
        return self._goto("block", event.start())

    def _read_parameter(self) -> bool:
        event = self._event(_PARAMETER_EVENT)
        if event is None:
            return False
        if event[0] == EOS:
            return self._goto("done", 0)
        name, string = self._parameter
        self._parameters[name] = _json_value("".join(self._value) + self._buffer[: event.start()], string)
        return self._goto("invoke", event.end())

    def _end_invoke(self) -> None:
        if self._name:
            arguments = _unwrap(self._parameters, self._name, self._tools)
            self._calls.append(ToolCall(index=self._num_calls, name=self._name, arguments=arguments))
            self._num_calls += 1


def _json_value(value: str, string: str | None) -> str:
    """A parameter's value as JSON text: as it stands if it is JSON and may be, else as a JSON string."""
    if string != "true" and _loads(value) is not None:
        return value.strip()
    return json.dumps(value, ensure_ascii=False)


def _loads(text: str) -> tuple[Any] | None:
    """The JSON value of `text` in a tuple; None if it is no JSON (NaN and Infinity are not)."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return (json.loads(text, parse_constant=refuse),)
    except (ValueError, RecursionError):
        return None


def _unwrap(parameters: dict[str, str], name: str, tools: Sequence[Any]) -> str:
    """The arguments as a JSON object; a lone wrapper that the tool's schema does not know is taken off."""
    if len(parameters) == 1 and (wrapper := next(iter(parameters))) in ("arguments", "input"):
        properties = _properties(name, tools)
        loaded = _loads(parameters[wrapper])
        inner = loaded[0] if loaded else None
        if isinstance(inner, str) and (again := _loads(inner)):
            inner = again[0]
        if properties is not None and wrapper not in properties and isinstance(inner, dict):
            return json.dumps(inner, ensure_ascii=False)
    return _object(parameters)


def _object(parameters: dict[str, str]) -> str:
    """A JSON object of values that are JSON text."""
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in parameters.items()) + "}"


def _properties(name: str, tools: Sequence[Any]) -> dict[str, Any] | None:
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties")
    return None


def parse(text: str, thinking_mode: str, *, tools: Sequence[Any] | None = None) -> dict[str, Any]:
    """An assistant message from a whole reply, leniently: never raises. Keys as in `parse_strict`."""
    parser = ReplyParser(thinking_mode, tools=tools)
    deltas = (parser.feed(text), parser.finish())
    return _message(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls],
    )


def _message(reasoning: str, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    tool_calls = [call.to_openai() for call in calls]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}


_STRICT_CALL = re.compile(rf'<{DSML}invoke\s*name="(.*?)">\n')
_STRICT_PARAMETER_START = f"<{DSML}parameter"
_STRICT_PARAMETER_END = f"</{DSML}parameter>\n"
_STRICT_PARAMETER = re.compile(r' name="(.*?)" string="(true|false)">(.*)', re.DOTALL)
_STRICT_CALL_END = re.compile(f"\n?</{DSML}invoke>\n")  # a call without parameters holds one empty line


def parse_strict(text: str, thinking_mode: str) -> dict[str, Any]:
    """{role, content, reasoning_content, tool_calls} of a reply that ends with EOS; raises ParseError otherwise.

    As in the release, EOS may be missing after a tool block, and a value that is not a string is not checked to be
    JSON.
    """
    block_start = f"\n\n<{DSML}tool_calls"
    reasoning = ""
    if thinking_mode == "thinking":
        reasoning, mark, text = text.partition(THINK_END)
        if not mark or block_start in reasoning:
            raise ParseError("Invalid thinking format: missing </think>")
    end, block = text.find(EOS), text.find(block_start)
    calls: list[ToolCall] = []
    if block >= 0 and (end < 0 or block < end):
        content = text[:block]
        calls, rest_at = _strict_calls(text, block + len(block_start))
        rest = text[rest_at:]
    elif end < 0:
        raise ParseError("Invalid format: missing EOS token")
    else:
        content, rest = text[:end], text[end:]
    if rest not in ("", EOS):
        raise ParseError(f"Unexpected content at end: {rest[:80]!r}")
    for marker in (BOS, EOS, THINK_START, THINK_END, DSML):
        if marker in content or marker in reasoning:
            raise ParseError(f"Unexpected special token {marker!r} in content")
    return _message(reasoning, content, calls)


def _strict_calls(text: str, at: int) -> tuple[list[ToolCall], int]:
    """Calls of the block whose first tag's ">" is at `at`, and the offset after its end tag."""
    calls: list[ToolCall] = []
    block_end = f"</{DSML}tool_calls>"
    if not text.startswith(">\n", at):
        raise ParseError(f"Tool call format error: expected '>\\n' but got {text[at : at + 80]!r}")
    at += 2
    while not text.startswith(block_end, at):
        call = _STRICT_CALL.match(text, at)
        if call is None:
            raise ParseError(f"Tool call format error at {text[at : at + 80]!r}")
        at = call.end()
        parameters: dict[str, str] = {}
        while text.startswith(_STRICT_PARAMETER_START, at):
            end_at = text.find(_STRICT_PARAMETER_END, at)
            parameter = _STRICT_PARAMETER.fullmatch(text, at + len(_STRICT_PARAMETER_START), max(end_at, at))
            if parameter is None:
                raise ParseError(f"Parameter format error at {text[at : at + 80]!r}")
            key, string, value = parameter.groups()
            if key in parameters:
                raise ParseError(f"Duplicate parameter name: {key!r}")
            parameters[key] = json.dumps(value, ensure_ascii=False) if string == "true" else value
            at = end_at + len(_STRICT_PARAMETER_END)
        end = _STRICT_CALL_END.match(text, at)
        if end is None:
            raise ParseError(f"Parameter format error at {text[at : at + 80]!r}")
        calls.append(ToolCall(index=len(calls), name=call[1], arguments=_object(parameters)))
        at = end.end()
    return calls, at + len(block_end)
