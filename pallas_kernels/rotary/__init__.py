"""Rotation of interleaved pairs of channels (rotary embedding)."""

from pallas_kernels.rotary.api import rotate

__all__ = ["rotate"]
