"""Command-line flags shared by the programs, and the configs they mean.  [no jax]

Every field of EngineConfig is a flag of the field's own name, which is vLLM's, with underscores or dashes.
Precedence, weakest first: the field's default, `--config`, the flag, `--set`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

from configs import serving
from dsjax.config import MESH_PATH, EngineConfig, ParallelConfig, override_all
from dsjax.config_fields import field_paths, flag_name
from dsjax.errors import ConfigError, RequestError
from dsjax.request import SamplingParams
from servers import flag_help

DEFAULT_PORT = 50051
# Room for 1.2 million prompt ids (4 MB) with 20 prompt_logprobs each (200 MB).
DEFAULT_MAX_MESSAGE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server needs besides the engine."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    grace_period_s: float = 30.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_unread_tokens: int = 1 << 18
    max_messages_per_s: int = 1500
    max_num_jobs: int = 1024
    max_job_bytes: int = 256 << 20
    job_ttl_s: float = 600.0
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    min_ping_interval_without_data_ms: int = 300_000
    max_ping_strikes: int = 2

    def __post_init__(self):
        def check(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value} must be in [{low}, {high}]")

        check("port", 0, 65535)
        check("grace_period_s", 0, 86400)
        check("max_message_bytes", 1024, (1 << 31) - 1)  # gRPC and protobuf count in int32
        check("max_unread_tokens", 1, 1 << 40)
        check("max_messages_per_s", 0, 1 << 30)
        check("max_num_jobs", 0, 1 << 20)
        check("max_job_bytes", 0, 1 << 50)
        check("job_ttl_s", 0, 7 * 86400)
        for name in "keepalive_time_ms keepalive_timeout_ms min_ping_interval_without_data_ms".split():
            check(name, 1, (1 << 31) - 1)
        check("max_ping_strikes", 0, (1 << 31) - 1)


def define_engine_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "config",
        None,
        "presets and YAML or JSON files, separated by commas, each over those before it; presets are "
        + ", ".join(serving.names()),
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "set", [], "a field of the config, e.g. --set cache.block_size=64; may be repeated", flag_values=values
    )
    _define_fields(values, serving.DEFAULT)
    _define_mesh(values)


def define_parallel_flags(values: flags.FlagValues) -> None:
    """Flags of ParallelConfig's fields alone, for programs that have no engine's other settings."""
    _define_fields(values, ParallelConfig())
    _define_mesh(values)


def _define_mesh(values: flags.FlagValues) -> None:
    text = "the sizes in one word, e.g. data:2,model:4 (model: tensor_parallel_size, stage: pipeline_parallel_size)"
    _define(values, "mesh", str, None, text)


def _define_fields(values: flags.FlagValues, config: Any) -> None:
    for path, default in field_paths(config).items():
        name = flag_name(path)
        shown = "" if name == "model" else f" (default: {default!r})"
        text = f"{flag_help.ENGINE[name]}{shown}"
        _define(values, name, type(default), None, text)


def define_server_flags(values: flags.FlagValues) -> None:
    d = ServerConfig()
    for name, help_text in flag_help.SERVER.items():
        _define(values, name, type(getattr(d, name)), getattr(d, name), help_text)


def define_sampling_flags(values: flags.FlagValues) -> None:
    """Flags of SamplingParams' fields; a name that is defined already (the engine's `seed`) keeps its meaning."""
    for name, (kind, text) in flag_help.SAMPLING.items():
        if name not in values:
            _define(values, name, kind, None, text)
    flags.DEFINE_multi_string("stop", [], "end at this text; may be repeated", flag_values=values)
    flags.DEFINE_multi_integer("stop_token_ids", [], "end at this token; may be repeated", flag_values=values)


def sampling_params(values: flags.FlagValues, skip: Sequence[str] = ()) -> SamplingParams:
    """Raises RequestError(INVALID_ARGUMENT) for a value outside its range."""
    given = {name: value_of(values, name) for name in flag_help.SAMPLING if name not in skip}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        stop=tuple(value_of(values, "stop")),
        stop_token_ids=tuple(value_of(values, "stop_token_ids")),
    )


def _define(values: flags.FlagValues, name: str, kind: type, default: Any, text: str) -> None:
    define: dict[type, Callable[..., Any]] = {
        bool: flags.DEFINE_boolean,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    define[kind](name, default, text, flag_values=values)


def parallel_config(values: flags.FlagValues) -> ParallelConfig:
    """What the flags of `define_parallel_flags` mean. Raises ConfigError."""
    return override_all(ParallelConfig(), _given(values, ParallelConfig(), "mesh"))


def _given(values: flags.FlagValues, config: Any, *more: str) -> list[tuple[str, str]]:
    """(path, value) of the config's fields, and of `more` paths, whose flags were given."""
    found = ((path, value_of(values, flag_name(path))) for path in (*field_paths(config), *more))
    return [(path, str(value)) for path, value in found if value is not None]


def engine_config(values: flags.FlagValues) -> EngineConfig:
    """The config that the parsed flags mean. Raises ConfigError."""
    config = serving.load(values.config or "")
    changes = _given(values, config, MESH_PATH)
    for assignment in value_of(values, "set"):
        path, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"set={assignment!r} must have the form FIELD=VALUE, e.g. cache.block_size=64")
        changes.append((path, value))
    return override_all(config, changes)


def value_of(values: flags.FlagValues, name: str) -> Any:
    """The value of a flag; None for one that is absent and has no default."""
    return values[name].value


def server_config(values: flags.FlagValues) -> ServerConfig:
    names = ServerConfig.__dataclass_fields__
    return ServerConfig(**{name: value_of(values, name) for name in names})


def config_json(**configs: Any) -> str:
    """One line: every field of the configs by dotted path."""
    return json.dumps({section: field_paths(config) for section, config in configs.items()})


def parse(values: flags.FlagValues, argv: Sequence[str], usage: str, *, positional: bool = False) -> list[str]:
    """Parses `argv` (argv[0] is the program) into `values` and returns the positional arguments.

    Prints help and raises SystemExit(0) for --help. Raises ConfigError for an unknown flag or a bad value.
    """
    args = _with_underscores(values, argv)
    ends = args.index("--") if "--" in args else len(args)
    if {"--help", "-h", "-help"} & set(args[1:ends]):
        print(f"{usage}\n\nFlags (dashes and underscores are the same):\n{values.get_help()}")
        raise SystemExit(0)
    try:
        rest = values(args)[1:]
    except flags.Error as error:
        raise ConfigError(str(error).replace("\n", " ")) from error
    if rest and not positional:
        raise ConfigError(f"argument {rest[0]!r} is not understood: every setting is a flag, see --help")
    return rest


def _with_underscores(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """`--max-num-seqs=4` as absl knows it, `--max_num_seqs=4`; `--no-x` as `--nox`."""
    out = [argv[0]]
    for number, arg in enumerate(argv[1:], 1):
        if arg == "--":
            return out + list(argv[number:])
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            name = name.replace("-", "_")
            if name.startswith("no_") and name not in values and name[3:] in values:
                name = "no" + name[3:]
            arg = f"--{name}{equals}{value}"
        out.append(arg)
    return out


def log_to_stderr() -> None:
    """Our own log from INFO on, of libraries only warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("dsjax").setLevel(logging.INFO)


def run(program: str, body: Callable[[], int]) -> int:
    """Runs a program's body; what the user did wrong becomes one line on stderr and exit code 2, Ctrl-C is 130."""
    try:
        return body()
    except (ConfigError, RequestError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
