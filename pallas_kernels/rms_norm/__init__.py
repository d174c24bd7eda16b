"""Root-mean-square normalisation."""

from pallas_kernels.rms_norm.api import normalised, rms_norm

__all__ = ["normalised", "rms_norm"]
