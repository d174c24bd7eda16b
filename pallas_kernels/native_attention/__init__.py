"""Attention of a decode step's rows on a CPU, in machine code of our own."""

from pallas_kernels.native_attention.api import attend, chosen_entries, supports, visible_entries, window_entries

__all__ = ["attend", "chosen_entries", "supports", "visible_entries", "window_entries"]
