"""Rotation of interleaved pairs of channels (rotary embedding)."""

from pallas_kernels.rotary.api import normalise_and_rotate, rotate

__all__ = ["normalise_and_rotate", "rotate"]
