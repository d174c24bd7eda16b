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

DEFAULT_MODEL = "dsjax-nano"
DEFAULT_PORT = 50051
# Room for 1.2 million prompt ids (4 MB) with 20 prompt_logprobs each (200 MB).
DEFAULT_MAX_MESSAGE_BYTES = 256 << 20

_HELP = {
    "model": "checkpoint folder, or 'dsjax-nano' for the embedded model",
    "tokenizer": "folder or file of the tokenizer; empty is the model's folder",
    "dtype": "of weights and activations: auto (float32 on CPU, else bfloat16), float32, bfloat16",
    "seed": "draws the seeds of requests that give none",
    "compilation_cache_dir": "where compiled programs are kept; empty keeps none",
    "fail_on_recompile": "makes a compilation after the warm-up an error",
    "block_size": "entries of a cache page",
    "enable_prefix_caching": "reuse the cache of prompts that begin alike",
    "num_gpu_blocks_override": "number of cache pages; 0 sizes the cache for max_num_seqs requests of max_model_len",
    "kv_cache_dtype": "auto (the activations'), float32, bfloat16",
    "max_num_seqs": "requests that run at the same time on a data shard",
    "max_num_batched_tokens": "tokens of a data shard in one step",
    "max_model_len": "tokens of a prompt and its answer; 0 is the model's own limit",
    "enable_chunked_prefill": "split long prompts over steps",
    "tensor_parallel_size": "devices that split a data shard's heads, output groups, vocabulary and experts' widths",
    "data_parallel_size": "data shards: parts of the engine with requests and cache pages of their own",
    "pipeline_parallel_size": "stages the layers are split into",
    "kv_parallel": "parts the cache of a data shard is split into; divides tensor_parallel_size; 1 keeps whole copies",
    "expert_parallel": "split experts over the whole mesh, instead of each expert's width over a data shard",
    "num_microbatches": "parts of a step that are in different pipeline stages at a time; 0 is a part a stage",
    "coordinator_address": "host:port of process 0, where several processes run one engine; empty is one alone",
    "num_processes": "processes that run this engine together",
    "process_id": "which of them this is; 0 schedules and serves",
    "peer_timeout_s": "a process not heard of for so long is dead, and with it the engine",
    "key_file": "file with a secret that the processes share; empty lets whoever reaches the port join",
    "kernels": "auto (the device's own Pallas kernels, where it has them), jnp (plain JAX in their place)",
    "weight_format": "auto (widened on the CPU, else stored), stored (FP8, FP4 and scales), widened (to dtype)",
    "max_num_waiting": "requests that may wait; more are refused with RESOURCE_EXHAUSTED",
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server needs besides the engine."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    grace_period_s: float = 30.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_unread_tokens: int = 1 << 18
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
        for name in "keepalive_time_ms keepalive_timeout_ms min_ping_interval_without_data_ms".split():
            check(name, 1, (1 << 31) - 1)
        check("max_ping_strikes", 0, (1 << 31) - 1)


def define_engine_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "config", None, f"a module of configs/serving: {', '.join(serving.names())}", flag_values=values
    )
    flags.DEFINE_multi_string(
        "set", [], "a field of the config, e.g. --set cache.block_size=64; may be repeated", flag_values=values
    )
    _define_fields(values, EngineConfig(model=DEFAULT_MODEL))
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
        text = f"{_HELP.get(name, f'EngineConfig.{path}')}{shown}"
        _define(values, name, type(default), None, text)


def define_server_flags(values: flags.FlagValues) -> None:
    d = ServerConfig()
    text = {
        "host": "address to listen on; 0.0.0.0 is every interface",
        "port": "port to listen on; 0 picks a free one",
        "grace_period_s": "how long running requests may go on after SIGTERM",
        "max_message_bytes": "largest request or answer message",
        "max_unread_tokens": "tokens and log-probabilities a client may leave unread before its call is ended",
        "keepalive_time_ms": "idle time after which a connection is pinged",
        "keepalive_timeout_ms": "how long a ping may stay unanswered",
        "keepalive_permit_without_calls": "ping connections without calls too",
        "min_ping_interval_without_data_ms": "a client that pings more often without data collects strikes",
        "max_ping_strikes": "strikes before the connection is closed; 0 is no limit",
    }
    for name, help_text in text.items():
        _define(values, name, type(getattr(d, name)), getattr(d, name), help_text)


_SAMPLING: dict[str, tuple[type, str]] = {
    "n": (int, "answers to each prompt"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "top_k": (int, "keep that many of the most likely tokens; 0 or -1 keeps all"),
    "min_p": (float, "drop tokens less likely than this times the most likely one"),
    "presence_penalty": (float, "against tokens that occurred in the answer"),
    "frequency_penalty": (float, "against tokens by how often they occurred in the answer"),
    "repetition_penalty": (float, "against tokens that occurred in prompt or answer; 1 is none"),
    "seed": (int, "makes the answer reproducible"),
    "min_tokens": (int, "no stop of any kind before that many tokens"),
    "max_tokens": (int, "longest answer; absent is what max_model_len leaves"),
    "ignore_eos": (bool, "go on after the end token"),
    "include_stop_str_in_output": (bool, "show the stop string that ended the answer"),
    "skip_special_tokens": (bool, "leave control tokens out of the text"),
    "logprobs": (int, "log-probabilities of that many of the most likely tokens"),
    "prompt_logprobs": (int, "the same for the prompt's tokens"),
}


def define_sampling_flags(values: flags.FlagValues) -> None:
    """Flags of SamplingParams' fields; a name that is defined already (the engine's `seed`) keeps its meaning."""
    for name, (kind, text) in _SAMPLING.items():
        if name not in values:
            _define(values, name, kind, None, text)
    flags.DEFINE_multi_string("stop", [], "end at this text; may be repeated", flag_values=values)
    flags.DEFINE_multi_integer("stop_token_ids", [], "end at this token; may be repeated", flag_values=values)


def sampling_params(values: flags.FlagValues, skip: Sequence[str] = ()) -> SamplingParams:
    """Raises RequestError(INVALID_ARGUMENT) for a value outside its range."""
    given = {name: value_of(values, name) for name in _SAMPLING if name not in skip}
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
    config = serving.load(values.config) if values.config else EngineConfig(model=values.model or DEFAULT_MODEL)
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
