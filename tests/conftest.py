"""JAX settings of the whole suite and of the programs it starts, set before anything imports JAX."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest


def _xla_flags(given: str) -> str:
    """Compiling is most of the suite's time, so LLVM optimises nothing unless a level is given; the HLO is the same."""
    flags = [given, "--xla_force_host_platform_device_count=8"]  # for the tests of meshes; all others use the first
    if "xla_backend_optimization_level" not in given:
        flags.append("--xla_backend_optimization_level=0")
        if version("jax").startswith("0.10."):  # these emitters, twice as quick, are gone from later ones
            flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags).strip()


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = _xla_flags(os.environ.get("XLA_FLAGS", ""))


def pytest_configure(config) -> None:
    """Compiled programs are kept between tests, workers and runs.

    JAX writes the cache's files not atomically, but takes a lock to read and write where their total has a limit.
    """
    folder = os.environ.get("DSJAX_TEST_COMPILE_CACHE") or str(config.cache.mkdir("xla"))
    if not hasattr(config, "workerinput"):
        _remove_incomplete(Path(folder))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(4 << 30)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def _remove_incomplete(folder: Path) -> None:
    """A program without the time of its last use, which a killed run leaves, or one whose total had no limit: JAX then
    fails to write any other."""
    for program in folder.glob("*-cache"):
        if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
            program.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def compiled_anew():
    """Nothing comes from the cache: a program for devices that are not there is kept there but cannot be read back."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is one was decided at the first compilation
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
