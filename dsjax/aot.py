"""The engine's step compiled for accelerators that are not there, and what the compilers say about it.

The program is the runner's own, lowered from shapes for the devices of a topology that libtpu or the CUDA plugin
describes. It never runs; its memory, its collectives and whether it fits are facts all the same.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

# A process that describes TPUs asks no metadata server, and may do so beside another one.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from dsjax import hlo
from dsjax.cache.spec import CacheSpec
from dsjax.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from dsjax.model.build import abstract_on_mesh
from dsjax.model.stages import Stages
from dsjax.runner.buckets import Bucket
from dsjax.runner.runner import Runner
from dsjax.sharding import Placement, Rules, make_mesh

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices to compile for."""

    platform: str  # of the compiler: tpu or cuda
    topology: str
    num_devices: int
    memory_bytes: int  # of a device


TARGETS = {
    # Memory of a chip: cloud.google.com/tpu/docs/v6e (32 GB), /v5p (95 GB), /tpu7x (192 GB, of two devices).
    "v6e:4x4": Target(platform="tpu", topology="v6e:4x4", num_devices=16, memory_bytes=32 * _GIB),
    "v5p:2x2x2": Target(platform="tpu", topology="v5p:2x2x2", num_devices=8, memory_bytes=95 * _GIB),
    "tpu7x:2x2x1": Target(platform="tpu", topology="tpu7x:2x2x1", num_devices=8, memory_bytes=96 * _GIB),
    # device_memory_size of an H100 SXM as its driver gives it
    "h100:8": Target(platform="cuda", topology="1x1x8", num_devices=8, memory_bytes=84942979072),
}

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(target: Target) -> list[Any]:
    """Descriptions of the target's devices. Raises ConfigError where its compiler is not installed."""
    options = {} if target.platform == "tpu" else {"target_config": _H100, "topology": target.topology}
    name = target.topology if target.platform == "tpu" else ""
    try:
        found = topologies.get_topology_desc(name, platform=target.platform, **options).devices
    except Exception as error:  # each backend has its own kind
        packages = "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc"
        raise ConfigError(f"target {target.topology} needs the packages {packages}: {error}") from error
    return list(found)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One compiled step. Bytes are of one device."""

    bucket: Bucket
    weight_bytes: int
    cache_bytes: int
    other_bytes: int  # sampling tables and what the host sends
    temp_bytes: int | None  # None where it did not compile
    compile_s: float
    collectives: dict[str, hlo.Traffic] = field(default_factory=dict)
    error: str = ""  # what the compiler said where it refused

    @property
    def argument_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    @property
    def total_bytes(self) -> int:
        """Arguments and temporaries; outputs take the place of donated arguments."""
        return self.argument_bytes + (self.temp_bytes or 0)


def abstract_runner(
    model: ModelConfig,
    parallel: ParallelConfig,
    devices: list[Any],
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    dtype: Any = jnp.bfloat16,
    stored: bool = True,
    scanned: bool = True,
) -> Runner:
    """The runner of an engine on these devices, of shapes alone. Raises ConfigError as loading it would."""
    mesh, rules = make_mesh(parallel, devices), Rules.of(model, parallel)
    stages = Stages.of(model, parallel.pipeline_parallel_size)
    dtype = jnp.dtype(dtype)
    max_model_len = scheduler.max_model_len or model.max_position_embeddings
    spec = CacheSpec.of(stages.config, cache, scheduler, max_model_len, dtype.itemsize, num_parts=parallel.kv_parallel)
    graph, params = abstract_on_mesh(
        stages, dtype, Placement(mesh, rules), with_mtp=False, stored=stored, scanned=scanned
    )
    return Runner(
        config=stages.config,
        graph=graph,
        params=params,
        spec=spec,
        scheduler=scheduler,
        mesh=mesh,
        active=stages.active,
        num_microbatches=parallel.num_microbatches or parallel.pipeline_parallel_size,
        dtype=dtype,
        abstract=True,
    )


def compile_step(runner: Runner, bucket: Bucket) -> tuple[StepReport, jax.stages.Compiled | None]:
    """Compiles a step of an abstract runner; the second is None where the compiler refused, e.g. for want of memory."""
    lowered = runner.lower(bucket)
    sizes = {name: _device_bytes(tree) for name, tree in vars(runner).items() if name in ("params", "cache", "slots")}
    layout_bytes = 4 * sum(np.prod(x.shape[1:]) for x in jax.tree.leaves(lowered.in_avals)[-2:])
    known = {
        "bucket": bucket,
        "weight_bytes": sizes["params"],
        "cache_bytes": sizes["cache"],
        "other_bytes": sizes["slots"] + int(layout_bytes),
    }
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except Exception as error:  # XlaRuntimeError, of whatever the compiler found
        elapsed = time.monotonic() - start
        return StepReport(**known, temp_bytes=None, compile_s=elapsed, error=str(error)), None
    elapsed = time.monotonic() - start
    memory = compiled.memory_analysis()
    report = StepReport(
        **known,
        temp_bytes=memory.temp_size_in_bytes,
        compile_s=elapsed,
        collectives=hlo.collectives(compiled.as_text()),
    )
    return report, compiled


def _device_bytes(tree: Any) -> int:
    """Bytes of the parts that one device holds."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))
