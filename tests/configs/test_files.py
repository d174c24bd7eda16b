"""Files of configuration: sections, the dynamic_batching block, and errors of one sentence that name file and key."""

import json

import pytest

from configs import serving
from dsjax.config import EngineConfig, ParallelConfig
from dsjax.errors import ConfigError
from dsjax.serving_config import TenantConfig


@pytest.fixture
def load(tmp_path):
    def go(text: str, name: str = "x.yaml") -> EngineConfig:
        (tmp_path / name).write_text(text)
        return serving.load(str(tmp_path / name))

    return go


def test_sections_fields_paths_and_tenants(load):
    config = load(
        """
        model: /models/flash
        seed: -3
        cache: {block_size: 32, kv_cache_dtype: int8}
        scheduler:
          max_num_seqs: 8
          warm: {share: 0.5, max_num_seqs: 6}
          tenants:
            gold: {weight: 4, reserved_seqs: 2}
            guests: {max_num_seqs: 1}
        feedback: {target_ttft_ms: 200}
        tiers:
        parallel: {mesh: "data:2,model:4", expert_parallel: true}
        """
    )
    assert (config.model, config.seed, config.cache.block_size, config.cache.kv_cache_dtype) == (
        "/models/flash", -3, 32, "int8")  # fmt: skip
    assert (config.scheduler.max_num_seqs, config.scheduler.warm.share, config.scheduler.warm.max_num_seqs) == (
        8,
        0.5,
        6,
    )
    assert config.scheduler.hot.max_tokens == 8192
    assert config.scheduler.tenants == (
        TenantConfig(name="gold", weight=4.0, reserved_seqs=2),
        TenantConfig(name="guests", max_num_seqs=1),
    )
    assert config.feedback.target_ttft_ms == 200.0
    assert config.parallel == ParallelConfig.of("data:2,model:4", expert_parallel=True)


@pytest.mark.parametrize("name", ["x.yaml", "x.yml", "x.json"])
def test_json_is_a_file_too(load, name):
    assert load(json.dumps({"scheduler": {"max_num_waiting": 7}}, indent="\t" if "json" in name else None), name) == (
        serving.files.apply(serving.DEFAULT, {"scheduler": {"max_num_waiting": 7}}, "x")
    )


@pytest.mark.parametrize(("timeout", "seconds"), [("0.05", 0.05), ("50ms", 0.05), ("0.05s", 0.05), ("2", 2.0)])
def test_the_dynamic_batching_block(load, timeout, seconds):
    config = load(
        f"""
        dynamic_batching:
          max_batch_size: 16
          timeout: {timeout}
          preemption: {{enabled: true, threshold: 0.9}}
        """
    ).scheduler
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.batch_wait_s) == (16, 256, seconds)
    assert (config.enable_preemption, config.preemption_threshold) == (True, 0.9)


def test_a_larger_batch_raises_the_budget_unless_the_file_gives_one(load):
    config = load("dynamic_batching: {max_batch_size: 200, preemption: {enabled: false}}").scheduler
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.enable_preemption) == (200, 400, False)
    config = load("{dynamic_batching: {max_batch_size: 200}, scheduler: {max_num_batched_tokens: 250}}").scheduler
    assert config.max_num_batched_tokens == 250
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100 must be at least max_num_seqs=200"):
        load("{dynamic_batching: {max_batch_size: 200}, scheduler: {max_num_batched_tokens: 100}}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler: {max_num_sequences: 1}", "'scheduler.max_num_sequences' is unknown: scheduler has batch_wait_s,"),
        ("batching: {}", "'batching' is unknown: a configuration has cache,"),
        ("scheduler: {hot: {chunk: 1}}", "'scheduler.hot.chunk' is unknown: scheduler.hot has budget_share,"),
        ("cache: 7", "cache=7 must be a mapping: cache has block_size,"),
        ("cache: {block_size: many}", "block_size='many' must be of type int"),
        ("cache: {block_size: 1.5}", "block_size='1.5' must be of type int"),
        ("cache: {block_size: }", "cache.block_size has no value"),
        ("cache: {block_size: 0}", "block_size=0 must be at least 1"),
        ("seed: [1]", "seed='[1]' must be of type int"),
        ("scheduler: {tenants: {gold: 4}}", "must be an object of objects"),
        ("scheduler: {tenants: {gold: {wait: 4}}}", "'wait' is not a field of TenantConfig"),
        ("dynamic_batching: {max_batch: 4}", "'dynamic_batching.max_batch' is unknown: dynamic_batching has max_batch"),
        ("dynamic_batching: 16", "dynamic_batching=16 must be a mapping: dynamic_batching has max_batch_size,"),
        ("dynamic_batching: {preemption: true}", "dynamic_batching.preemption=True must be a mapping"),
        ("dynamic_batching: {timeout: 50us}", "dynamic_batching.timeout='50us' must be seconds"),
        ("dynamic_batching: {timeout: soon}", "dynamic_batching.timeout='soon' must be seconds"),
        ("dynamic_batching: {timeout: -1}", "batch_wait_s=-1.0 must be at least 0"),
        ("dynamic_batching: {preemption: {threshold: 2}}", "preemption_threshold=2.0 must be in (0, 1]"),
        ("{dynamic_batching: {max_batch_size: 4}, scheduler: {max_num_seqs: 5}}",
         "scheduler.max_num_seqs is 5 and dynamic_batching makes it 4: give one of them"),
        ("model: 2026-11-30", "model=datetime.date(2026, 11, 30) must be text, a number, true or false"),
        ("scheduler: {tenants: &a {gold: *a}}", "scheduler.tenants={'gold': {...}} must be text, a number"),
        ("{a: " * 2000 + "1" + "}" * 2000, "cannot be read: it is nested too deeply"),
        ("- 1", "must be a mapping of fields and sections"),
        ("", "must be a mapping of fields and sections"),
        ("a: b: c", "cannot be read: mapping values are not allowed here"),
        ("!!python/object/apply:os.getcwd []", "cannot be read: could not determine a constructor"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_key(load, tmp_path, text, words):
    with pytest.raises(ConfigError) as raised:
        load(text)
    message = str(raised.value)
    assert message.startswith(f"config='{tmp_path}/x.yaml'") and words in message and "\n" not in message


def test_a_file_that_is_not_there_or_not_json(load):
    with pytest.raises(ConfigError, match=r"config='/nowhere/x\.yml' cannot be read: .*No such file"):
        serving.load("/nowhere/x.yml")
    with pytest.raises(ConfigError, match="cannot be read: Expecting property name"):
        load("{a: 1}", "x.json")
