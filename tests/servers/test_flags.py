"""Flags to configs: vLLM's names, dashes, precedence, and errors of one sentence."""

import json
import socket

import pytest
from absl import flags

from dsjax.chat import ChatStrings
from dsjax.config import EngineConfig, SchedulerConfig
from dsjax.config_fields import field_paths, flag_name
from dsjax.errors import ConfigError
from dsjax.request import SamplingParams
from dsjax.serving_config import TenantConfig
from servers import flag_help, main
from servers import flags as server_flags


def _configs(*args: str):
    values = flags.FlagValues()
    server_flags.define_engine_flags(values)
    server_flags.define_server_flags(values)
    server_flags.parse(values, ["dsjax-serve", *args], "usage")
    return server_flags.engine_config(values), server_flags.server_config(values)


def test_no_flags_are_the_defaults():
    assert _configs() == (EngineConfig(model="dsjax-nano"), server_flags.ServerConfig())
    assert server_flags.ServerConfig().port == 50051


@pytest.mark.parametrize("args", [["--max_num_seqs=8"], ["--max-num-seqs=8"], ["--max-num-seqs", "8"]])
def test_dashes_and_underscores_are_the_same(args):
    assert _configs(*args)[0].scheduler == SchedulerConfig(max_num_seqs=8)


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("--model=/m", "model", "/m"),
        ("--tokenizer=/t", "tokenizer", "/t"),
        ("--dtype=bfloat16", "dtype", "bfloat16"),
        ("--max-model-len=512", "scheduler.max_model_len", 512),
        ("--max-num-batched-tokens=64", "scheduler.max_num_batched_tokens", 64),
        ("--no-enable-chunked-prefill", "scheduler.enable_chunked_prefill", False),
        ("--noenable_prefix_caching", "cache.enable_prefix_caching", False),
        ("--enable-prefix-caching=false", "cache.enable_prefix_caching", False),
        ("--block-size=32", "cache.block_size", 32),
        ("--kv-cache-dtype=float32", "cache.kv_cache_dtype", "float32"),
        ("--num-gpu-blocks-override=9", "cache.num_gpu_blocks_override", 9),
        ("--max-num-waiting=7", "scheduler.max_num_waiting", 7),
        ("--seed=-3", "seed", -3),
        ("--fail-on-recompile", "fail_on_recompile", True),
        ("--compilation-cache-dir=", "compilation_cache_dir", ""),
    ],
)
def test_vllm_names(flag, path, value):
    config = _configs(flag)[0]
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value


def test_set_wins_over_flag_wins_over_config():
    config, _ = _configs("--config=nano", "--max_num_seqs=8", "--block_size=32", "--set", "cache.block_size=16",
                         "--set=scheduler.max_num_waiting=3")  # fmt: skip
    assert (config.model, config.scheduler.max_num_seqs) == ("dsjax-nano", 8)
    assert (config.cache.block_size, config.scheduler.max_num_waiting) == (16, 3)


def test_fields_that_limit_each_other_come_in_any_order():
    for args in (
        ["--max_num_seqs=512", "--max_num_batched_tokens=1024"],
        ["--max_num_batched_tokens=8", "--max_num_seqs=4"],
    ):
        assert _configs(*args)[0].scheduler.max_num_seqs in (4, 512)


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("--max_num_sequences=1", "Unknown command line flag 'max_num_sequences'"),
        ("--max_num_seqs=many", "--max_num_seqs=many"),
        ("--max_num_seqs=0", "max_num_seqs=0 must be at least 1"),
        ("--max_num_seqs=257", "max_num_batched_tokens=256 must be at least max_num_seqs=257"),
        ("--dtype=int3", "dtype='int3' must be one of auto, float32, bfloat16"),
        ("--config=huge", "config='huge' is unknown: configs/serving has a100, aggressive"),
        ("--set=cache.block=1", "'block' is not a field of CacheConfig"),
        ("--set=cache.block_size", "set='cache.block_size' must have the form FIELD=VALUE"),
        ("--set=cache.block_size=x", "block_size='x' must be of type int"),
        ("--port=65536", "port=65536 must be in [0, 65535]"),
        ("--grace_period_s=-1", "grace_period_s=-1.0 must be in [0, 86400]"),
        ("stray", "argument 'stray' is not understood"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arg, words, capsys):
    def never(config):
        raise AssertionError("the engine must not be made")

    assert main.main(["dsjax-serve", arg], make_engine=never, read_chat_strings=never) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("dsjax-serve: error: ") and words in err


def test_help_names_every_flag_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as raised:
        _configs("--help")
    assert raised.value.code == 0
    assert "--max_num_seqs" in capsys.readouterr().out


def test_the_resolved_config_is_one_line_of_json():
    engine, server = _configs("--max_num_seqs=8")
    text = server_flags.config_json(engine=engine, server=server)
    assert "\n" not in text
    assert json.loads(text)["engine"]["scheduler.max_num_seqs"] == 8
    assert json.loads(text)["server"]["port"] == 50051


def test_sampling_flags():
    values = flags.FlagValues()
    server_flags.define_sampling_flags(values)
    server_flags.parse(values, ["x", "--temperature=0", "--max-tokens=9", "--stop=a", "--stop=b"], "usage")
    assert server_flags.sampling_params(values) == SamplingParams(temperature=0.0, max_tokens=9, stop=("a", "b"))


def test_a_config_error_of_the_engine_is_one_line_and_exit_code_2(capfd):
    def make(config):
        raise ConfigError("model='/nowhere' has no config.json")

    assert (
        main.main(
            ["dsjax-serve", "--port=0", "--model=/nowhere"],
            make_engine=make,
            read_chat_strings=lambda config: ChatStrings(),
        )
        == 2
    )
    out, err = capfd.readouterr()
    assert (out, "dsjax-serve: error: model='/nowhere' has no config.json\n" in err) == ("", True)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model=/nowhere"], "model='/nowhere' is not a folder, nor an embedded model (dsjax-nano)"),
        (["--compilation_cache_dir=/proc/nope"], "compilation_cache_dir='/proc/nope' cannot be made: "),
        (["--disk_cache_dir=/proc/foo", "--disk_cache_bytes=1024", "--host_cache_bytes=1024"],
         "disk_cache_dir='/proc/foo' cannot be made: "),
    ],
)  # fmt: skip
def test_what_is_wrong_at_first_sight_is_said_before_the_server_listens(flags, sentence, capfd):
    def never(config):
        raise AssertionError("the engine must not be made")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["dsjax-serve", "--model=dsjax-nano", f"--port={taken.getsockname()[1]}", *flags]
        assert main.main(argv, make_engine=never) == 2
    err = capfd.readouterr().err
    assert f"dsjax-serve: error: {sentence}" in err and "listen" not in err


def test_every_flag_has_its_line_of_help():
    fields = {flag_name(path) for path in field_paths(EngineConfig(model="m"))}
    assert set(flag_help.ENGINE) == fields
    assert set(flag_help.SERVER) == set(server_flags.ServerConfig.__dataclass_fields__)


def test_flags_of_paths_tenants_and_sections():
    config, server = _configs(
        "--hot-max-tokens=100", "--cold_budget_share=0.25", '--tenants={"gold": {"weight": 4}}',
        "--scheduling_policy=shortest", "--target_ttft_ms=200", "--host_cache_bytes=1024", "--step_stall_s=3",
        "--max_num_jobs=5", "--job_ttl_s=2.5",
    )  # fmt: skip
    scheduler = config.scheduler
    assert (scheduler.hot.max_tokens, scheduler.cold.budget_share) == (100, 0.25)
    assert scheduler.tenants == (TenantConfig(name="gold", weight=4.0),)
    assert (scheduler.scheduling_policy, config.feedback.target_ttft_ms) == ("shortest", 200.0)
    assert (config.tiers.host_cache_bytes, config.overload.step_stall_s) == (1024, 3.0)
    assert (server.max_num_jobs, server.job_ttl_s) == (5, 2.5)


def test_flag_over_file_over_preset(tmp_path):
    (tmp_path / "x.yaml").write_text("dynamic_batching: {max_batch_size: 32, timeout: 20ms}\nmodel: /m")
    config, _ = _configs(f"--config=conservative,{tmp_path}/x.yaml", "--batch_wait_s=0.5")
    assert (config.model, config.scheduler.max_num_seqs, config.scheduler.batch_wait_s) == ("/m", 32, 0.5)
    assert config.scheduler.max_num_waiting == 64
