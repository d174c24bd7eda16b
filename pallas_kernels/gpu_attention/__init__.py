"""Attention on a GPU: window, HCA and CSA, decode and prefill, by one kernel that takes the keys of each in turn."""

from pallas_kernels.gpu_attention.kernel import attend, supports
from pallas_kernels.gpu_attention.keys import chosen_keys, visible_keys, window_keys

__all__ = ["attend", "chosen_keys", "supports", "visible_keys", "window_keys"]
