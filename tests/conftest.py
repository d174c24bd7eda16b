"""JAX settings of the whole suite, set before anything imports JAX."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices for the tests of meshes; all others use the first.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


def pytest_configure(config) -> None:
    """Compiled programs are kept between tests and runs: compiling is most of the suite's time.

    A folder a worker of pytest-xdist, since JAX does not write the cache's files atomically.
    """
    import jax

    base = os.environ.get("DSJAX_TEST_COMPILE_CACHE") or str(config.cache.mkdir("xla"))
    folder = Path(base) / os.environ.get("PYTEST_XDIST_WORKER", "main")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
