"""Configuration as a mapping, from a preset or a YAML or JSON file, to changes of an EngineConfig.  [no jax]

model: /models/flash                    a field of EngineConfig
scheduler:                              a section of it
  max_num_seqs: 32
  warm: {share: 0.9}
  tenants: {gold: {weight: 4}}
parallel: {mesh: "data:2,model:4"}      what --mesh says
dynamic_batching:                       the block of this name that users of other servers know
  max_batch_size: 16                    scheduler.max_num_seqs; max_num_batched_tokens follows, if it is too small
  timeout: 50ms                         scheduler.batch_wait_s; a number is in seconds
  preemption: {enabled: true, threshold: 0.9}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dsjax.config import MESH_PATH, EngineConfig, override_all
from dsjax.config_fields import field_paths
from dsjax.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")
BATCHING = "dynamic_batching"
_BATCHING_PATHS = {
    "max_batch_size": "scheduler.max_num_seqs",
    "timeout": "scheduler.batch_wait_s",
    "preemption.enabled": "scheduler.enable_preemption",
    "preemption.threshold": "scheduler.preemption_threshold",
}
_UNITS_S = {"ms": 1e-3, "s": 1.0}


def read(path: str) -> Mapping[str, Any]:
    """What a file says. Raises ConfigError if it cannot be read or is no mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"config={path!r} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config={path!r} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"config={path!r} must be a mapping of fields and sections, such as scheduler: {{...}}")
    return found


def apply(config: EngineConfig, changes: Mapping[str, Any], source: str) -> EngineConfig:
    """`config` with the changes of one preset or file. Raises ConfigError that names `source`."""
    try:
        rest = {name: value for name, value in changes.items() if name != BATCHING}
        paths = [*field_paths(config), MESH_PATH]
        pairs = dict(_leaves(rest, paths))
        if BATCHING in changes:
            for path, text in _batching(config, changes[BATCHING], pairs).items():
                if pairs.setdefault(path, text) != text:
                    raise ConfigError(f"{path} is {pairs[path]} and {BATCHING} makes it {text}: give one of them")
        return override_all(config, list(pairs.items()))
    except ConfigError as error:
        raise ConfigError(f"config={source!r}: {error}") from error


def _batching(config: EngineConfig, block: Any, given: Mapping[str, str]) -> dict[str, str]:
    """{path of a field: text} that `dynamic_batching` means, beside what is `given` elsewhere in its file."""
    out: dict[str, str] = {}
    for name, text in _leaves({BATCHING: block}, [f"{BATCHING}.{name}" for name in _BATCHING_PATHS]):
        name = name.removeprefix(f"{BATCHING}.")
        out[_BATCHING_PATHS[name]] = _seconds(f"{BATCHING}.{name}", text) if name == "timeout" else text
    rows, budget = out.get("scheduler.max_num_seqs", ""), "scheduler.max_num_batched_tokens"
    # So that prompts move on while every row decodes.
    if budget not in given and rows.isdecimal() and 2 * int(rows) > config.scheduler.max_num_batched_tokens:
        out[budget] = str(2 * int(rows))
    return out


def _seconds(path: str, text: str) -> str:
    """The seconds of "0.05", "0.05s" or "50ms", as text."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :] or "s"
    try:
        return f"{float(number) * _UNITS_S[unit]:g}"
    except (KeyError, ValueError):
        raise ConfigError(f"{path}={text!r} must be seconds, such as 0.05 or '50ms'") from None


def _leaves(changes: Any, paths: list[str], above: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every value of nested mappings, whose paths must be among `paths`."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{above.rstrip('.')}={changes!r} must be a mapping: {_allowed(paths, above)}")
    for key, value in changes.items():
        path = f"{above}{key}"
        if any(known.startswith(f"{path}.") for known in paths):
            yield from _leaves({} if value is None else value, paths, f"{path}.")
        elif path not in paths:
            raise ConfigError(f"{path!r} is unknown: {_allowed(paths, above)}")
        elif value is None:
            raise ConfigError(f"{path} has no value: give one, or leave it out")
        else:
            yield path, _text(path, value)


def _text(path: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # a date, bytes, an anchor inside itself
        raise ConfigError(f"{path}={value!r} must be text, a number, true or false: put it in quotes") from None


def _allowed(paths: list[str], above: str) -> str:
    names = sorted({path[len(above) :].partition(".")[0] for path in paths if path.startswith(above)})
    if not above:
        names.append(BATCHING)
    return f"{above.rstrip('.') or 'a configuration'} has {', '.join(names)}"
