"""Operations in machine code of our own, for the CPU that this runs on.

What XLA's CPU compiler makes of a small operation, forty of its own, costs more than the work. An operation is written
with LLVM's builder (`emit`, `numbers`, `entries`), called by XLA with its buffers (`handler`, `operands`) and compiled
in the process that uses it (`machine_code`). Operations lie with what they are a form of: `<op>/native.py`.
"""

from pallas_kernels.native.machine_code import register

__all__ = ["register"]
