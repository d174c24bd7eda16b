"""JAX settings of the whole suite, set before anything imports JAX."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure(config) -> None:
    """Compiled programs are kept between tests and runs: compiling is most of the suite's time."""
    import jax

    folder = os.environ.get("DSJAX_TEST_COMPILE_CACHE") or str(config.cache.mkdir("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
