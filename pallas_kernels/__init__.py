"""Kernels: knows JAX and shapes, nothing of requests or schedules. A folder an operation."""
