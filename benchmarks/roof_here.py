"""What the processor of this machine can do at most, measured: how fast it reads its memory, how fast it multiplies."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import num_cores
from benchmarks.roofline import Roof

READ_BYTES = 256 << 20  # more than a cache holds
MATMUL_SIZE = 2048
NUM_TIMES = 7


def measure_roof(dtype: str, read_bytes: int = READ_BYTES, size: int = MATMUL_SIZE) -> Roof:
    """The best of some tries: each core reading its part of an array, and a square product in `dtype`."""
    parts = np.array_split(np.ones(read_bytes // 4, np.float32), num_cores())
    with ThreadPoolExecutor(len(parts)) as threads:
        read_s = _shortest_s(lambda: list(threads.map(np.max, parts)))
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    matmul_s = _shortest_s(lambda: product(matrix, matrix).block_until_ready())
    return Roof(bytes_per_s=sum(part.nbytes for part in parts) / read_s, flops_per_s=2 * size**3 / matmul_s)


def _shortest_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_TIMES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
