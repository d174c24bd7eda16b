"""Renders chat messages to DeepSeek-V4's prompt format and reads replies back.  [no jax]

A conversation becomes segments, each either one control token or text. Only this file's markers are control
segments: whatever a client sends (content, reasoning, tool names, arguments, schemas) is text, and is encoded so that
"</think>" or "<｜User｜>" in it stays ordinary characters.

    BOS [effort] system [tools] [response format] {<｜User｜> turn <｜Assistant｜> <think>|</think> reply EOS}...

The rules of which reasoning is kept are those of the release (encoding_dsv4): in thinking mode the reasoning before
the last user turn is dropped, unless a message defines tools or `drop_thinking` is False.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsjax import chat_markers as markers
from dsjax.chat_messages import Turn, merge_turns, read_messages
from dsjax.chat_parse import ParseError, ReplyDelta, ReplyParser, ToolCall, parse, parse_strict
from dsjax.chat_strings import EFFORTS, ChatStrings, Segment
from dsjax.errors import invalid, shown
from dsjax.prompt_len import check_texts
from dsjax.tokenizer import Tokenizer

__all__ = [
    "ChatStrings", "ParseError", "ReplyDelta", "ReplyParser", "Segment", "ToolCall",
    "encode_chat", "encode_segments", "parse", "parse_strict", "render",
]  # fmt: skip

THINKING_MODES = ("chat", "thinking")


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], *, max_model_len: int | None = None, **options: Any
) -> list[int]:
    """Token ids of `render(messages, **options)`.

    Raises RequestError(INVALID_ARGUMENT), before it encodes, if they must be too many for `max_model_len`.
    """
    segments = render(messages, **options)
    if max_model_len is not None:
        check_texts(tokenizer, (segment.text for segment in segments if not segment.is_control), max_model_len)
    return encode_segments(tokenizer, segments)


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[int]:
    """Control segments become their one id, text is encoded with `allow_special=False`.

    Raises RequestError(INVALID_ARGUMENT) for a control token that the tokenizer lacks.
    """
    ids: list[int] = []
    for segment in segments:
        if not segment.is_control:
            ids += tokenizer.encode(segment.text)
            continue
        token_id = tokenizer.control_id(segment.text)
        if token_id is None:
            raise invalid(f"messages need the control token {segment.text!r}, which this model's tokenizer lacks")
        ids.append(token_id)
    return ids


def render(
    messages: Sequence[Any],
    *,
    thinking_mode: str = "chat",
    reasoning_effort: str | None = None,
    drop_thinking: bool = True,
    add_default_bos_token: bool = True,
    tools: Sequence[Any] | None = None,
    response_format: Any = None,
    strings: ChatStrings | None = None,
    reply_after_system: bool = False,
) -> list[Segment]:
    """The prompt of a conversation: no two text segments are neighbours, so a BPE merge never stops at a seam.

    `messages` are OpenAI's, with the release's extras: roles `developer` and `latest_reminder`, and the fields
    `tools`, `response_format`, `task`, `wo_eos`. `tools` and `response_format` here are put on a leading system
    message, which is made if there is none. `reasoning_effort` adds text in thinking mode only, as in
    the release. `strings` are the checkpoint's texts. A conversation that ends in a system message opens no reply in
    the release; with `reply_after_system` it does. Raises RequestError(INVALID_ARGUMENT) that names messages[i].field.
    """
    if thinking_mode not in THINKING_MODES:
        raise invalid(
            f"thinking_mode={shown(thinking_mode)} is not allowed: it must be one of {', '.join(THINKING_MODES)}"
        )
    if reasoning_effort is not None and reasoning_effort not in EFFORTS:
        raise invalid(
            f"reasoning_effort={shown(reasoning_effort)} is not allowed: it must be one of {', '.join(EFFORTS)}"
        )
    turns = merge_turns(read_messages(messages, tools=tools, response_format=response_format))
    thinking = thinking_mode == "thinking"
    keep_all = not drop_thinking or any(turn.tools for turn in turns)
    if thinking and not keep_all:
        turns = _without_earlier_developers(turns)
    out = _Prompt(strings or ChatStrings(), thinking=thinking, keep_all=keep_all)
    if add_default_bos_token:
        out.control(markers.BOS)
    if thinking and reasoning_effort is not None:
        out.text(out.strings.effort(reasoning_effort))
    last_user = _last_user(turns)
    for i, turn in enumerate(turns):
        out.turn(turn, after_task=i > 0 and turns[i - 1].task is not None, is_current=i > last_user)
        if i + 1 == len(turns) or turns[i + 1].role in ("assistant", "latest_reminder"):
            out.transition(turn, is_current=i >= last_user, reply_after_system=reply_after_system)
    return out.segments()


def _last_user(turns: Sequence[Turn]) -> int:
    """Index of the last user or developer turn; -1 without one."""
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _without_earlier_developers(turns: list[Turn]) -> list[Turn]:
    last = _last_user(turns)
    return [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= last]


class _Prompt:
    """Collects segments; neighbouring texts are joined."""

    def __init__(self, strings: ChatStrings, *, thinking: bool, keep_all: bool):
        self.strings = strings
        self.thinking = thinking
        self.keep_all = keep_all
        self._pieces: list[Segment] = []

    def text(self, text: str) -> None:
        self._pieces.append(Segment(text, False))

    def control(self, marker: str) -> None:
        self._pieces.append(Segment(marker, True))

    def segments(self) -> list[Segment]:
        out: list[Segment] = []
        run: list[str] = []
        for piece in [*self._pieces, Segment("", True)]:
            if not piece.is_control:
                run.append(piece.text)
                continue
            if text := "".join(run):
                out.append(Segment(text, False))
            run.clear()
            out.append(piece)
        return out[:-1]

    def turn(self, turn: Turn, *, after_task: bool, is_current: bool) -> None:
        """One message; `after_task`: it answers a task, which is never thought about."""
        if turn.role == "assistant":
            if self.thinking and not after_task and (self.keep_all or is_current):
                self.text(turn.reasoning)
                self.control(markers.THINK_END)
            self.text(turn.text)
            if turn.tool_calls:
                self._tool_calls(turn)
            if not turn.wo_eos:
                self.control(markers.EOS)
            return
        if turn.role in ("user", "developer"):
            self.control(markers.USER)
        elif turn.role == "latest_reminder":
            self.control(markers.LATEST_REMINDER)
        self.text(turn.text)
        if turn.tools:
            self.text("\n\n")
            self._pieces += self.strings.tools("\n".join(to_json(tool, "tools") for tool in turn.tools))
        if turn.response_format:
            self.text("\n\n")
            self._pieces += self.strings.response_format(to_json(turn.response_format, "response_format"))

    def transition(self, turn: Turn, *, is_current: bool, reply_after_system: bool) -> None:
        """What opens the reply to `turn`, or asks for its task."""
        opens_reply = turn.role in ("user", "developer") or (reply_after_system and turn.role == "system")
        if turn.task is not None and turn.task != "action":
            self.control(markers.TASKS[turn.task])
        elif turn.task == "action":
            self._open_reply(self.thinking)
            self.control(markers.TASKS[turn.task])
        elif opens_reply:
            self._open_reply(self.thinking and (self.keep_all or is_current))

    def _open_reply(self, think: bool) -> None:
        self.control(markers.ASSISTANT)
        self.control(markers.THINK_START if think else markers.THINK_END)

    def _tool_calls(self, turn: Turn) -> None:
        self.text("\n\n")
        self._tag("<", "tool_calls>\n")
        for i, call in enumerate(turn.tool_calls):
            self._tag("\n<" if i else "<", f'invoke name="{call.name}">\n')
            for j, (key, value) in enumerate(call.parameters.items()):
                is_text = isinstance(value, str)
                self._tag("\n<" if j else "<", f'parameter name="{key}" string="{str(is_text).lower()}">')
                self.text(value if is_text else to_json(value, "tool_calls"))
                self._tag("</", "parameter>")
            self._tag("\n</", "invoke>")
        self._tag("\n</", "tool_calls>")

    def _tag(self, before: str, after: str) -> None:
        self.text(before)
        self.control(markers.DSML)
        self.text(after)


def to_json(value: Any, name: str) -> str:
    """JSON as the release writes it; raises RequestError for what JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(f"{name} cannot be written as JSON: {error}") from error
