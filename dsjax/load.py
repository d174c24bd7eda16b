"""From a config to a running engine: finds the checkpoint, loads it, sizes the cache, builds the runner."""

from __future__ import annotations

import dataclasses
import importlib.resources
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsjax import checkpoint
from dsjax.cache.disk import Disk
from dsjax.cache.spec import CacheSpec
from dsjax.cache.tiers import Tiers
from dsjax.channel import PeerLost
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.distributed import Follower, Leader, facts_of, initialize
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.fingerprint import cache_fingerprint
from dsjax.model.build import abstract_on_mesh, assemble_on_mesh
from dsjax.model.stages import Stages
from dsjax.runner.runner import Runner
from dsjax.sharding import Placement, Rules, make_mesh
from dsjax.tokenizer import Tokenizer
from pallas_kernels.target import CPU, Target

log = logging.getLogger("dsjax")

EMBEDDED = ("dsjax-nano",)  # models that come with the package


def model_dir(model: str) -> Path:
    """The folder of a checkpoint: a path, or the name of an embedded model. Raises ConfigError."""
    if model in EMBEDDED:
        return Path(str(importlib.resources.files("dsjax") / "embedded" / model))
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ConfigError(f"model={model!r} is not a folder, nor an embedded model ({', '.join(EMBEDDED)})")
    return path


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError for what of a config cannot be used, as far as that can be told at once."""
    ModelConfig.from_dir(model_dir(config.model))
    _made("compilation_cache_dir", config.compilation_cache_dir)
    if config.tiers.host_cache_bytes:
        _made("disk_cache_dir", config.tiers.disk_cache_dir)


def resolve_dtype(dtype: str, platform: str) -> jnp.dtype:
    """auto is float32 on the CPU, which multiplies it well, and bfloat16 elsewhere."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(dtype)


def keeps_stored(weight_format: str, platform: str) -> bool:
    """Whether FP8 and FP4 weights stay so on the devices: auto widens them on CPUs, whose matmuls gain nothing."""
    return weight_format == "stored" or (weight_format == "auto" and platform != "cpu")


def load_runner(
    path: Path, config: ModelConfig, *, with_mtp: bool = False, progress: bool = False, **options: Any
) -> tuple[Runner, int]:
    """Loads a checkpoint into a runner, see `make_runner`.

    `with_mtp` loads the MTP block too, which a step with `all_logits` then runs; serving does not use it.
    """

    def read(dtype: str, stored: bool) -> Mapping[str, np.ndarray]:
        return checkpoint.open_params(path, config, dtype, include_mtp=with_mtp, stored=stored, progress=progress)

    return make_runner(config, read, with_mtp=with_mtp, **options)


def make_runner(
    config: ModelConfig,
    read: Callable[[str, bool], Mapping[str, np.ndarray]] | None,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    parallel: ParallelConfig | None = None,
    devices: Sequence[Any] | None = None,
    dtype: str = "auto",
    weight_format: str = "auto",
    kernels: str = "auto",
    scanned: bool | None = None,
    with_mtp: bool = False,
    **options: Any,
) -> tuple[Runner, int]:
    """A runner on the mesh that `parallel` describes; also returns the longest sequence it may be asked to hold.

    The mesh is of `devices`, by default all there are. `read(dtype, stored)` gives the parameters {dotted path: array},
    `stored` as the checkpoint has them; without it the runner is abstract, of shapes alone. Layers that repeat are
    `scanned` in a loop, by default on accelerators alone: there it compiles in seconds instead of minutes, while on a
    CPU it would copy each layer's weights.
    """
    max_model_len = scheduler.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the model's max_position_embeddings="
            f"{config.max_position_embeddings}"
        )
    parallel = parallel or ParallelConfig()
    if parallel.num_microbatches > scheduler.max_num_seqs:
        raise ConfigError(
            f"num_microbatches={parallel.num_microbatches} must be at most max_num_seqs={scheduler.max_num_seqs}: each "
            "holds at least a request"
        )
    mesh, rules = make_mesh(parallel, devices), Rules.of(config, parallel)
    stages = Stages.of(config, parallel.pipeline_parallel_size)
    platform = mesh.devices.flat[0].platform
    compute = resolve_dtype(dtype, platform)
    target = CPU if kernels == "jnp" else Target.of(mesh.devices.flat[0])
    log.info("kernels: %s", _kernels_in_words(kernels, mesh.devices.flat[0], target))
    spec = CacheSpec.of(
        stages.config,
        cache,
        scheduler,
        max_model_len,
        compute.name,
        num_mtp_layers=int(with_mtp),
        num_parts=parallel.kv_parallel,
        tiled=target.has_tpu_kernels,
        as_bits=platform == "cpu",
    )
    few = spec.num_requests(max(1, min(max_model_len, config.hca_ratio)))[0] < scheduler.max_num_seqs
    log.log(logging.WARNING if few else logging.INFO, "cache: %s", spec.describe(max_model_len))
    form: Any = {
        "with_mtp": with_mtp,
        "stored": keeps_stored(weight_format, platform),
        "scanned": platform != "cpu" if scanned is None else scanned,
    }
    placement = Placement(mesh, rules)
    if read is None:
        graph, state = abstract_on_mesh(stages, compute, placement, **form)
    else:
        params = read(compute.name, form["stored"])
        graph, state = assemble_on_mesh(stages, params, compute, placement, **form)
    runner = Runner(
        config=stages.config,
        graph=graph,
        params=state,
        spec=spec,
        scheduler=scheduler,
        mesh=mesh,
        active=stages.active,
        num_microbatches=parallel.num_microbatches or parallel.pipeline_parallel_size,
        dtype=compute,
        abstract=read is None,
        target=target,
        **options,
    )
    return runner, max_model_len


def _kernels_in_words(kernels: str, device: Any, target: Target) -> str:
    if kernels == "jnp":
        return "plain JAX, as kernels=jnp asks"
    if target.has_tpu_kernels or target.has_gpu_kernels:
        return f"Pallas, for {target.generation}"
    if target.has_native_kernels:
        return "machine code made for this CPU, and plain JAX"
    if target.generation:
        return f"plain JAX, since those for {device.device_kind} need JAX 0.12 or newer and this is {jax.__version__}"
    return f"plain JAX, since there are none for {device.device_kind} (platform {device.platform})"


def load_engine(config: EngineConfig, *, progress: bool = False) -> Engine:
    """Builds the engine of a config, in process 0 where there are several.

    Raises ConfigError for anything that cannot be used, PeerLost or TimeoutError if another process is not there.
    """
    if config.distributed.process_id > 0:
        raise ConfigError(f"process_id={config.distributed.process_id} only follows process 0: start it as dsjax-serve")
    path = model_dir(config.model)
    model_config = ModelConfig.from_dir(path)
    tokenizer = load_tokenizer(config, path)
    leader = Leader.gather(config.distributed, facts_of(config, path))
    try:
        host_dtype = config.tiers.host_cache_dtype if config.tiers.host_cache_bytes else ""
        options = {"on_launch": leader.send, "on_read": leader.wait, "host_cache_dtype": host_dtype}
        runner, max_model_len = _load_part(config, path, model_config, progress, **options)
        tiers = make_tiers(config, path, runner)
    except BaseException as error:
        leader.close(error)
        raise
    if tokenizer is not None:
        extra = tuple(i for i in tokenizer.eos_token_ids if i not in model_config.eos_token_ids)
        model_config = dataclasses.replace(model_config, eos_token_ids=model_config.eos_token_ids + extra)
    return Engine(
        config=config,
        model_config=model_config,
        runner=runner,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        leader=leader,
        tiers=tiers,
    )


def make_tiers(config: EngineConfig, folder: Path, runner: Runner) -> Tiers | None:
    """What the cache has below the device, None for nothing. Raises ConfigError if the disk's folder cannot be used."""
    sizes, disk = config.tiers, None
    if not sizes.host_cache_bytes:
        return None
    if sizes.disk_cache_dir:
        disk = Disk(sizes.disk_cache_dir, sizes.disk_cache_bytes, cache_fingerprint(folder, config, runner))
        log.info("cache on disk: %d prefixes in %s", disk.num_records, disk.folder)
    return Tiers(sizes.host_cache_bytes, disk)


def load_follower(
    config: EngineConfig, on_lost: Callable[[PeerLost], None], *, progress: bool = False
) -> tuple[Follower, Runner]:
    """Builds the runner of a process other than 0, once process 0 is there; `on_lost` is called from another thread.

    Raises ConfigError for anything that cannot be used or differs from process 0.
    """
    path = model_dir(config.model)
    model_config = ModelConfig.from_dir(path)
    follower = Follower.join(config.distributed, facts_of(config, path), on_lost)
    try:
        runner, _ = _load_part(config, path, model_config, progress)
    except BaseException as error:
        follower.leave(error)
        raise
    return follower, runner


def _load_part(
    config: EngineConfig, path: Path, model_config: ModelConfig, progress: bool, **options
) -> tuple[Runner, int]:
    """What every process of an engine does."""
    initialize(config.distributed)
    program_dir = None
    if config.distributed.num_processes == 1:
        program_dir = _made("compilation_cache_dir", config.compilation_cache_dir)
    else:  # which must find the same programs, or else all compile together: JAX sees to that
        use_compile_cache(config.compilation_cache_dir)
    return load_runner(
        path,
        model_config,
        cache=config.cache,
        scheduler=config.scheduler,
        parallel=config.parallel,
        dtype=config.dtype,
        weight_format=config.weight_format,
        kernels=config.kernels,
        progress=progress,
        fail_on_recompile=config.fail_on_recompile,
        program_dir=program_dir,
        **options,
    )


def load_tokenizer(config: EngineConfig, path: Path) -> Tokenizer | None:
    """The tokenizer beside the weights, or the one named; None (ids only) where the folder has none."""
    if config.tokenizer:
        return Tokenizer.from_path(config.tokenizer)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_path(path)
    log.warning("%s has no tokenizer.json: prompts and answers are token ids only", path)
    return None


def use_compile_cache(folder: str) -> None:
    """Turns on JAX's persistent compilation cache, for programs that are no single engine's."""
    path = _made("compilation_cache_dir", folder)
    if path is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _made(name: str, folder: str) -> Path | None:
    """The folder of the field `name`; None where it is empty. Raises ConfigError if it cannot be made."""
    if not folder:
        return None
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}={folder!r} cannot be made: {error.strerror}") from error
    return path
