"""Checks of config fields, and their values read from text.  [no jax]

A config is a frozen dataclass; its fields may be configs. The *path* of a field is its dotted name from the top.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from dsjax.errors import ConfigError

C = TypeVar("C")


def check(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def within(config: object, low: float, high: float, names: str, open_low: bool = False) -> None:
    """The fields are in [low, high], or in (low, high]."""
    for name in names.split():
        value = getattr(config, name)
        ok = (low < value if open_low else low <= value) and value <= high
        check(ok, f"{name}={value} must be in {'(' if open_low else '['}{low}, {high}]")


def at_least(config: object, low: float, names: str) -> None:
    for name in names.split():
        if not getattr(config, name) >= low:  # also NaN
            raise ConfigError(f"{name}={getattr(config, name)} must be at least {low}")


def one_of(config: object, name: str, allowed: Sequence[str]) -> None:
    if getattr(config, name) not in allowed:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be one of {', '.join(allowed)}")


def flag_name(path: str) -> str:
    """A field's name among flags: its path without the section, as in `block_size`, `hot_max_tokens`."""
    return "_".join(path.split(".")[1:]) or path


def field_paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf field of a config as {dotted path: value}, sections in order; tuples of configs as JSON text."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            out.update(field_paths(value, f"{prefix}{f.name}."))
        elif isinstance(value, tuple):
            out[prefix + f.name] = _named_to_text(value)
        else:
            out[prefix + f.name] = value
    return out


def override(config: C, path: str, value: str) -> C:
    """Returns `config` with the dotted field `path` set to `value`, parsed by the field's type.

    Raises ConfigError for an unknown field or a value of the wrong type.
    """
    name, _, rest = path.partition(".")
    fields = {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    if name not in fields:
        raise ConfigError(f"{path!r} is not a field of {type(config).__name__}: it has {', '.join(sorted(fields))}")
    current = getattr(config, name)
    if rest:
        if not dataclasses.is_dataclass(current):
            raise ConfigError(f"{name!r} of {type(config).__name__} has no fields, so {path!r} cannot be set")
        return dataclasses.replace(config, **{name: override(current, rest, value)})  # type: ignore[type-var]
    kind = typing.get_type_hints(type(config))[name]
    return dataclasses.replace(config, **{name: _parse(path, kind, value)})  # type: ignore[type-var]


def _parse(path: str, kind: Any, value: str) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{path}={value!r} must be true or false")
        return value.lower() in ("true", "1")
    if typing.get_origin(kind) is tuple:
        return _named_from_text(path, typing.get_args(kind)[0], value)
    if kind in (int, float, str):
        try:
            parsed = kind(value)
        except ValueError as error:
            raise ConfigError(f"{path}={value!r} must be of type {kind.__name__}") from error
        if isinstance(parsed, float) and not math.isfinite(parsed):
            raise ConfigError(f"{path}={value!r} must be finite")
        return parsed
    raise ConfigError(f"{path} cannot be set from text: it is a {getattr(kind, '__name__', kind)}")


def _named_to_text(configs: tuple[Any, ...]) -> str:
    """{name: {field: value}} of the fields that differ from their defaults; "" for none."""
    out = {}
    for config in configs:
        defaults = type(config)(name=config.name)
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        out[config.name] = {n: v for n, v in fields.items() if n != "name" and v != getattr(defaults, n)}
    return json.dumps(out) if out else ""


def _named_from_text(path: str, kind: Any, text: str) -> tuple[Any, ...]:
    """What `_named_to_text` wrote. Raises ConfigError."""
    try:
        raw = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}={text!r} is not JSON: {error}") from error
    return named(path, kind, raw)


def named(path: str, kind: Any, raw: Any) -> tuple[Any, ...]:
    """Configs of `kind` from {name: {field: value}}. Raises ConfigError for a field or type that `kind` has not."""
    if not isinstance(raw, dict) or not all(isinstance(fields, dict) for fields in raw.values()):
        raise ConfigError(f'{path}={raw!r} must be an object of objects, such as {{"gold": {{"weight": 4}}}}')
    out = []
    for name, fields in raw.items():
        config = kind(name=name)
        for key, value in fields.items():
            config = override(config, key, str(value))
        out.append(config)
    return tuple(out)
