"""The feed-forward experts that tokens chose, weighted and summed."""

from pallas_kernels.expert_ffn.api import Matrices, clamped_swiglu, expert_ffn, swiglu

__all__ = ["Matrices", "clamped_swiglu", "expert_ffn", "swiglu"]
