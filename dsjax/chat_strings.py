"""The long, fixed texts of a checkpoint's chat format, read from `chat_strings.json` in its folder.  [no jax]

They belong to the release, not to this program, so they are data. The file holds one JSON object; every key is
optional, and asking for something whose key (or the whole file) is absent is a RequestError:

    "tools_template": str             names {tool_schemas}: one JSON schema a line
    "response_format_template": str   names {schema}: the JSON schema of the reply
    "effort_prefix": {effort: str}, or {release: {effort: str}} with "effort_release": the release that holds here
                                      (absent: the first). The effort "none_or_high" stands for "high".

Both templates may also name {dsml_token}, {thinking_start_token} and {thinking_end_token}, which become those control
tokens. Other keys are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsjax.chat_markers import DSML, THINK_END, THINK_START
from dsjax.errors import ConfigError, invalid

FILE_NAME = "chat_strings.json"
EFFORTS = ("low", "high", "max")
_CONTROL = {"dsml_token": DSML, "thinking_start_token": THINK_START, "thinking_end_token": THINK_END}


class Segment(NamedTuple):
    """A piece of a prompt: one control token, or text in which nothing is a control token."""

    text: str
    is_control: bool


@dataclass(frozen=True, kw_only=True)
class ChatStrings:
    """The texts of one checkpoint; `ChatStrings()` is a checkpoint without the file."""

    tools_template: str | None = None
    response_format_template: str | None = None
    effort_prefix: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_path(cls, path: str | Path) -> ChatStrings:
        """Reads a checkpoint's folder, where the file may be absent, or the file itself; raises ConfigError."""
        path = Path(path)
        file = path / FILE_NAME if path.is_dir() else path
        if path.is_dir() and not file.exists():
            return cls()
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{str(file)!r} must hold a JSON object")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChatStrings:
        """Checks the parsed file; raises ConfigError."""
        return cls(
            tools_template=_template(data, "tools_template", "tool_schemas"),
            response_format_template=_template(data, "response_format_template", "schema"),
            effort_prefix=_effort_prefix(data),
        )

    def tools(self, schemas: str) -> list[Segment]:
        """The tool preamble around `schemas`, one JSON object a line."""
        return _fill(_have(self.tools_template, "tools", "tools_template"), {"tool_schemas": schemas})

    def response_format(self, schema: str) -> list[Segment]:
        template = _have(self.response_format_template, "response_format", "response_format_template")
        return _fill(template, {"schema": schema})

    def effort(self, effort: str) -> str:
        """What stands before the first message in thinking mode; "" for the checkpoint's plain effort."""
        table = _have(self.effort_prefix or None, "reasoning_effort", "effort_prefix")
        if effort not in table:
            raise invalid(f"reasoning_effort={effort!r} is not allowed: this checkpoint offers {', '.join(table)}")
        return table[effort]


def _have(value: Any, asked: str, key: str) -> Any:
    if value is None:
        raise invalid(f"{asked} cannot be used: the checkpoint's folder has no {FILE_NAME} with {key!r} in it")
    return value


def _fill(template: str, values: Mapping[str, str]) -> list[Segment]:
    """Replaces {names} in one pass, so braces in a value mean nothing."""
    pieces = re.split(r"\{(\w+)\}", template)
    out = []
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            out.append(Segment(piece, False))
        elif piece in _CONTROL:
            out.append(Segment(_CONTROL[piece], True))
        else:
            out.append(Segment(values[piece], False))
    return out


def _template(data: Mapping[str, Any], key: str, value_name: str) -> str | None:
    template = data.get(key)
    if template is None:
        return None
    if not isinstance(template, str):
        raise ConfigError(f"{key} of {FILE_NAME} must be a string")
    names = re.findall(r"\{(\w+)\}", template)
    unknown = [name for name in names if name not in _CONTROL and name != value_name]
    if unknown or value_name not in names:
        allowed = ", ".join(f"{{{name}}}" for name in (value_name, *_CONTROL))
        raise ConfigError(f"{key} of {FILE_NAME} must name {{{value_name}}} and may name only {allowed}, not {unknown}")
    return template


def _effort_prefix(data: Mapping[str, Any]) -> dict[str, str]:
    table = data.get("effort_prefix", {})
    if isinstance(table, dict) and table and all(isinstance(value, dict) for value in table.values()):
        release = data.get("effort_release", next(iter(table)))
        if release not in table:
            raise ConfigError(f"effort_release={release!r} of {FILE_NAME} is not one of {', '.join(table)}")
        table = table[release]
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise ConfigError(f"effort_prefix of {FILE_NAME} must map efforts to strings")
    return {"high" if effort == "none_or_high" else effort: prefix for effort, prefix in table.items()}
