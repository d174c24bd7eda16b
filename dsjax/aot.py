"""The engine's step compiled for accelerators that are not there, and what the compilers say about it.

The program is the runner's own, lowered from shapes for the devices of a topology that libtpu or the CUDA plugin
describes. It never runs; its memory, its collectives and whether it fits are facts all the same.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

# A process that describes TPUs asks no metadata server, and may do so beside another one.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies

from dsjax.errors import ConfigError
from dsjax.runner.buckets import Bucket
from dsjax.runner.runner import Runner
from dsjax.traffic import Collective, collectives

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices to compile for."""

    platform: str  # of the compiler: tpu or cuda
    topology: str
    num_devices: int
    memory_bytes: int  # of a device
    config: str = ""  # of a GPU: the limits its compiler asks for


def _gpu(
    name: str, num_devices: int, *, major: int, cores: int, bandwidth: int, l2: int, ghz: float, memory: int
) -> Target:
    """A GPU's limits as its driver gives them; those of shared memory and registers are the H100's for all."""
    config = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {ghz} device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
    topology = f"1x1x{num_devices}"
    return Target(platform="cuda", topology=topology, num_devices=num_devices, memory_bytes=memory, config=config)


def _h100(num_devices: int) -> Target:
    limits = {"major": 9, "cores": 132, "bandwidth": 3352320000000, "l2": 52428800, "ghz": 1.98, "memory": 84942979072}
    return _gpu("NVIDIA H100 80GB HBM3", num_devices, **limits)


def _b200(num_devices: int) -> Target:
    limits = {"major": 10, "cores": 148, "bandwidth": 7672000000000, "l2": 132644864, "ghz": 1.965}
    return _gpu("NVIDIA B200", num_devices, **limits, memory=191510806528)


def _tpu(topology: str, num_devices: int, memory_gib: int) -> Target:
    return Target(platform="tpu", topology=topology, num_devices=num_devices, memory_bytes=memory_gib * _GIB)


TARGETS = {
    # Memory of a chip: cloud.google.com/tpu/docs/v5e (16 GB), /v6e (32 GB), /v5p (95 GB), /tpu7x (192 GB, of two
    # devices).
    "v5e:4x4": _tpu("v5e:4x4", 16, 16),
    "v6e:4x4": _tpu("v6e:4x4", 16, 32),
    "v5p:2x2x2": _tpu("v5p:2x2x2", 8, 95),
    "tpu7x:2x2x1": _tpu("tpu7x:2x2x1", 8, 96),
    "h100:8": _h100(8),
}

# One device of each kind that has kernels of its own; libtpu describes no less than a host's four chips.
CHIPS = {
    "v5e": _tpu("v5e:2x2", 4, 16),
    "v5p": _tpu("v5p:2x2x1", 4, 95),
    "v6e": _tpu("v6e:2x2", 4, 32),
    "tpu7x": _tpu("tpu7x:2x2x1", 8, 96),
    "h100": _h100(1),
    "b200": _b200(1),
}

# What a target's compiler is installed with.
_COMPILERS = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
}


def missing_packages(target: Target) -> list[str]:
    """Those that its compiler needs and that are not installed."""
    return [name for name in _COMPILERS[target.platform] if not _installed(name)]


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def devices(target: Target) -> list[Any]:
    """Descriptions of the target's devices. Raises ConfigError where its compiler is not installed."""
    options = {} if target.platform == "tpu" else {"target_config": target.config, "topology": target.topology}
    name = target.topology if target.platform == "tpu" else ""
    try:
        found = topologies.get_topology_desc(name, platform=target.platform, **options).devices
    except Exception as error:  # each backend has its own kind
        packages = ", ".join(_COMPILERS[target.platform])
        raise ConfigError(f"target {target.topology} needs the packages {packages}: {error}") from error
    return list(found)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One compiled step. Bytes are of one device."""

    bucket: Bucket
    weight_bytes: int
    cache_bytes: int
    other_bytes: int  # sampling tables
    temp_bytes: int | None  # None where the compiler refused
    compile_s: float
    compile_cpu_s: float  # of all cores
    collectives: list[Collective] = field(default_factory=list)
    error: str = ""  # what the compiler said where it refused

    @property
    def argument_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    @property
    def total_bytes(self) -> int:
        """Arguments and temporaries; results take the place of donated arguments."""
        return self.argument_bytes + (self.temp_bytes or 0)


def compile_step(runner: Runner, bucket: Bucket) -> tuple[StepReport, jax.stages.Compiled | None]:
    """Compiles a step of a runner; the second is None where the compiler refused, e.g. for want of memory."""
    known: dict[str, Any] = {
        "bucket": bucket,
        "weight_bytes": _device_bytes(runner.params),
        "cache_bytes": _device_bytes(runner.cache),
        "other_bytes": _device_bytes(runner.slots),
    }
    wall, cpu = time.monotonic(), time.process_time()

    def spent() -> dict[str, Any]:
        return {"compile_s": time.monotonic() - wall, "compile_cpu_s": time.process_time() - cpu}

    try:
        compiled = runner.lower(bucket).compile()
    except jax.errors.JaxRuntimeError as error:
        return StepReport(**known, temp_bytes=None, **spent(), error=str(error)), None
    took = spent()
    memory = compiled.memory_analysis()
    assert memory is not None  # every compiler here gives it
    temp = memory.temp_size_in_bytes
    report = StepReport(**known, temp_bytes=temp, **took, collectives=collectives(compiled.as_text() or ""))
    return report, compiled


def _device_bytes(tree: Any) -> int:
    """Bytes of the parts that one device holds."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
