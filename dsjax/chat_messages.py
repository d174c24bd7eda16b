"""Checks chat messages and merges them into the turns of DeepSeek-V4's prompt format.  [no jax]"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsjax.chat_markers import TASKS
from dsjax.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call of an earlier reply, its arguments parsed."""

    id: str
    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    call_id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A checked message. A tool result is a user turn; `parts` of a user turn are joined by blank lines."""

    role: str
    parts: tuple[str | ToolResult, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[Call, ...] = ()
    tools: tuple[Any, ...] = ()  # the schemas: OpenAI's `function` objects
    response_format: Any = None
    task: str | None = None
    wo_eos: bool = False  # an assistant message the model is to continue

    @property
    def text(self) -> str:
        return "\n\n".join(
            f"<tool_result>{part.text}</tool_result>" if isinstance(part, ToolResult) else part for part in self.parts
        )


def merge_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Consecutive user turns (and so tool results) become one, its results in the order of the calls."""
    groups: list[tuple[list[Turn], Mapping[str, int]]] = []  # turns that become one, and the order of the calls then
    order: dict[str, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.tool_calls:
            order = {call.id: i for i, call in enumerate(turn.tool_calls) if call.id}
        last = groups[-1][0][-1] if groups else None
        if turn.role == "user" and last is not None and last.role == "user" and last.task is None:
            groups[-1][0].append(turn)
        else:
            groups.append(([turn], order))
    return [_joined(group, order) if group[0].role == "user" else group[0] for group, order in groups]


def _joined(turns: Sequence[Turn], order: Mapping[str, int]) -> Turn:
    """One turn of consecutive user turns: all their parts, and the last's task."""
    parts = tuple(part for turn in turns for part in turn.parts)
    return replace(turns[0], parts=_in_call_order(parts, order), task=turns[-1].task)


def _in_call_order(parts: tuple[str | ToolResult, ...], order: Mapping[str, int]) -> tuple[str | ToolResult, ...]:
    results = [part for part in parts if isinstance(part, ToolResult)]
    ordered = iter(sorted(results, key=lambda result: order.get(result.call_id, 0)))  # an unknown id first, as released
    return tuple(next(ordered) if isinstance(part, ToolResult) else part for part in parts)


def read_messages(messages: Any, *, tools: Any = None, response_format: Any = None) -> list[Turn]:
    """Checks messages one by one; raises RequestError(INVALID_ARGUMENT) that names messages[i].field.

    `tools` and `response_format` go to a leading system message, which is made if there is none.
    """
    if not isinstance(messages, (list, tuple)):
        raise invalid(f"messages must be a list of at least one message, not {_short(messages)}")
    if not messages:
        raise invalid("messages is empty: it must have at least one message")
    turns = [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    if tools or response_format:
        if turns[0].role != "system":
            turns.insert(0, Turn(role="system"))
        if (tools and turns[0].tools) or (response_format and turns[0].response_format):
            raise invalid("tools and response_format must stand on the request or on messages[0], not on both")
        turns[0] = replace(
            turns[0],
            tools=_read_tools("tools", tools) or turns[0].tools,
            response_format=_read_object("response_format", response_format) or turns[0].response_format,
        )
    return turns


def _read_message(at: str, message: Any) -> Turn:
    if not isinstance(message, Mapping):
        raise invalid(f"{at} must be an object with role and content, not {_short(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{at}.role={_short(role)} is not allowed: it must be one of {', '.join(ROLES)}")
    for name, allowed in (("tool_calls", ("assistant",)), ("tools", ("system", "developer")),
                          ("response_format", ("system", "developer"))):  # fmt: skip
        if message.get(name) and role not in allowed:
            raise invalid(f"{at}.{name} is not allowed for role {role!r}: only for {' and '.join(allowed)}")
    tools = _read_tools(f"{at}.tools", message.get("tools"))
    calls = _read_calls(f"{at}.tool_calls", message.get("tool_calls"))
    response_format = _read_object(f"{at}.response_format", message.get("response_format"))
    task = message.get("task")
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise invalid(f"{at}.task={_short(task)} is not allowed: it must be one of {', '.join(TASKS)}")
    may_be_absent = bool(calls) if role == "assistant" else role == "system" and bool(tools or response_format)
    parts = _read_content(f"{at}.content", message.get("content"), may_be_absent)
    if role == "developer" and not any(parts):
        raise invalid(f"{at}.content must not be empty for role 'developer'")
    reasoning = _read_text(at, message, "reasoning_content") or _read_text(at, message, "reasoning")
    if role == "tool":
        text = "\n\n".join(parts)
        return Turn(role="user", parts=(ToolResult(call_id=_read_text(at, message, "tool_call_id"), text=text),))
    return Turn(
        role=role,
        parts=parts,
        reasoning=reasoning,
        tool_calls=calls,
        tools=tools,
        response_format=response_format,
        task=task,
        wo_eos=message.get("wo_eos") is True,
    )


def _read_content(at: str, content: Any, may_be_absent: bool) -> tuple[str, ...]:
    if content is None:
        if may_be_absent:
            return ("",)
        raise invalid(f"{at} is missing: it must be a string or a list of text parts")
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, (list, tuple)):
        raise invalid(f"{at} must be a string or a list of text parts, not {_short(content)}")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text":
            raise invalid(f"{at}[{j}].type={_short(kind)} is not allowed: only 'text' parts can be read")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{at}[{j}].text must be a string, not {_short(part.get('text'))}")
        texts.append(part["text"])
    return tuple(texts)


def _read_text(at: str, message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{at}.{name} must be a string, not {_short(value)}")
    return value or ""


def _read_object(at: str, value: Any) -> Any:
    if value is not None and not isinstance(value, Mapping):
        raise invalid(f"{at} must be an object, not {_short(value)}")
    return value or None


def _read_tools(at: str, tools: Any) -> tuple[Any, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, (list, tuple)):
        raise invalid(f"{at} must be a list, not {_short(tools)}")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"{at}[{i}] must be an object with a `function` that has a name")
    return tuple(tool["function"] for tool in tools)


def _read_calls(at: str, calls: Any) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, (list, tuple)):
        raise invalid(f"{at} must be a list, not {_short(calls)}")
    return tuple(_read_call(f"{at}[{i}]", call) for i, call in enumerate(calls))


def _read_call(at: str, call: Any) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise invalid(f"{at}.function must be an object with name and arguments, not {_short(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.function.name must be a string that is not empty, not {_short(name)}")
    if isinstance(arguments, Mapping):
        parameters: Any = arguments
    elif isinstance(arguments, str):
        try:
            parameters = json.loads(arguments)
        except (ValueError, RecursionError):
            parameters = None
        if not isinstance(parameters, dict):  # what is no JSON object is shown to the model as it was, as released
            parameters = {"arguments": arguments}
    else:
        raise invalid(f"{at}.function.arguments must be JSON text or an object, not {_short(arguments)}")
    return Call(id=_read_text(at, call, "id"), name=name, parameters=parameters)


def _short(value: Any) -> str:
    """A value as an error shows it, at most 40 characters of it."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value[:40])
    return type(value).__name__ if isinstance(value, (Mapping, Sequence)) else repr(value)[:40]
