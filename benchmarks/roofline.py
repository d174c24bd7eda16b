"""What a device can do at most, and the time that a kernel takes there at least.  [no jax]"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Roof:
    """Of one device, as its maker gives them."""

    bytes_per_s: float  # of its memory
    flops_per_s: float  # of dense bfloat16 matmuls

    def seconds(self, bytes_moved: int, flops: int) -> float:
        """The longer of moving the bytes and doing the sums, which go on at the same time."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s)

    def bound(self, bytes_moved: int, flops: int) -> str:
        """Which of the two it is."""
        return "bytes" if bytes_moved / self.bytes_per_s >= flops / self.flops_per_s else "flops"


ROOFS = {
    # docs.cloud.google.com/tpu/docs/v5e
    "v5e": Roof(bytes_per_s=819e9, flops_per_s=197e12),
    # docs.cloud.google.com/tpu/docs/tpu7x, whose table has all three; a chip of tpu7x is two devices
    "v5p": Roof(bytes_per_s=2765e9, flops_per_s=459e12),
    "v6e": Roof(bytes_per_s=1638e9, flops_per_s=918e12),
    "tpu7x": Roof(bytes_per_s=7380e9 / 2, flops_per_s=2307e12 / 2),
    # nvidia.com/en-us/data-center/h100: SXM, half the figure with sparsity
    "h100": Roof(bytes_per_s=3350e9, flops_per_s=989e12),
    # nvidia.com/en-us/data-center/hgx: an eighth of eight B200, half the figure with sparsity
    "b200": Roof(bytes_per_s=7700e9, flops_per_s=2250e12),
}
