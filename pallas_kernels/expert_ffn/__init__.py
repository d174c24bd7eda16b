"""The feed-forward experts that tokens chose, weighted and summed."""

from pallas_kernels.expert_ffn.api import Apart, Matrices, apart_pays, clamped_swiglu, expert_ffn

__all__ = ["Apart", "Matrices", "apart_pays", "clamped_swiglu", "expert_ffn"]
