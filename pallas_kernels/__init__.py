"""Kernels: knows JAX and shapes, nothing of requests or schedules. One folder an operation, one public function each."""
