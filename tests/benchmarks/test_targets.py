"""What benchmarks.targets prints and refuses; compiling itself is tested in tests/test_aot.py."""

from __future__ import annotations

import dataclasses

import pytest
from absl import flags

from benchmarks import targets
from dsjax.config import ParallelConfig
from servers import flags as server_flags

STEP = {
    "target": "v6e:4x4",
    "step": "decode",
    "bucket": {"num_tokens": 64, "num_rows": 64, "block": 1},
    "weight_bytes": 3 << 30,
    "cache_bytes": 1 << 30,
    "argument_bytes": 4 << 30,
    "temp_bytes": 1 << 29,
    "total_bytes": 9 << 29,
    "memory_bytes": 32 << 30,
    "fits": True,
    "compile_s": 12.4,
    "compile_cpu_s": 30.6,
    "parallel": dataclasses.asdict(ParallelConfig.of("data:4,model:4", kv_parallel=2, expert_parallel=True)),
    "collectives": {"all-reduce": {"count": 86, "sent_bytes": 3 << 20}, "all-to-all": {"count": 9, "sent_bytes": 0}},
}


def test_a_line_a_step():
    refused = STEP | {"step": "prefill", "temp_bytes": None, "fits": False, "total_bytes": 4 << 30, "collectives": {}}
    refused["parallel"] = dataclasses.asdict(ParallelConfig.of("model:4,stage:2"))
    lines = targets.table([STEP, refused]).splitlines()
    assert lines[2] == (
        "| v6e:4x4 | data 4 x model 4, kv 2, experts over all | decode 64 | 3.00 | 1.00 | 0.50 | 12.5 % "
        "| 86 ar (3.0), 9 a2a (0.0) | 12 s (31) | yes, 4.5 of 32 |"
    )
    assert lines[3] == (
        "| v6e:4x4 | data 1 x model 4, stages 2 | prefill 64 | 3.00 | 1.00 | - | - | - | 12 s (31) "
        "| refused, see the result's error, 4.0 of 32 |"
    )
    assert {line.count("|") for line in lines} == {11}


def test_the_mesh_is_the_flags_or_one_for_the_devices():
    def parallel(*argv: str) -> ParallelConfig:
        values = flags.FlagValues()
        server_flags.define_parallel_flags(values)
        server_flags.parse(values, ["x", *argv], "")
        return targets.parallel_of(values, 8)

    assert parallel() == ParallelConfig.of("data:2,model:4", kv_parallel=4, expert_parallel=True)
    assert parallel("--mesh=data:8") == ParallelConfig.of("data:8")
    assert parallel("--tensor_parallel_size=8", "--kv_parallel=2").kv_parallel == 2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--target=v4:2x2", "target='v4:2x2' must be one of v5e:4x4, v6e:4x4, v5p:2x2x2, tpu7x:2x2x1, h100:8"),
        ("--model=gpt", "model='gpt' must be one of deepseek-v4-flash"),
        ("--step=train", "step='train' must be decode or prefill"),
    ],
)
def test_wrong_flags_are_one_sentence(flag, message, capsys):
    assert targets.main(["benchmarks.targets", flag]) == 2
    assert message in capsys.readouterr().err
