"""What a device can do at most, and the time that a kernel takes there at least.  [no jax]"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Roof:
    """Of one device, as its maker gives them."""

    bytes_per_s: float  # of its memory
    flops_per_s: float  # of dense bfloat16 matmuls
    memory_bytes: int = 0
    link_bytes_per_s: float = 0.0  # to other devices, in one direction

    def seconds(self, bytes_moved: float, flops: float) -> float:
        """The longer of moving the bytes and doing the sums, which go on at the same time."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s)

    def bound(self, bytes_moved: float, flops: float) -> str:
        """Which of the two it is."""
        return "bytes" if bytes_moved / self.bytes_per_s >= flops / self.flops_per_s else "flops"


ROOFS = {
    # docs.cloud.google.com/tpu/docs/v5e; links there are given for both directions together
    "v5e": Roof(bytes_per_s=819e9, flops_per_s=197e12, memory_bytes=16 << 30, link_bytes_per_s=400e9 / 2),
    # docs.cloud.google.com/tpu/docs/tpu7x, whose table has all three; a chip of tpu7x is two devices
    "v5p": Roof(bytes_per_s=2765e9, flops_per_s=459e12, memory_bytes=95 << 30, link_bytes_per_s=1200e9 / 2),
    "v6e": Roof(bytes_per_s=1638e9, flops_per_s=918e12, memory_bytes=32 << 30, link_bytes_per_s=800e9 / 2),
    "tpu7x": Roof(
        bytes_per_s=7380e9 / 2, flops_per_s=2307e12 / 2, memory_bytes=96 << 30, link_bytes_per_s=1200e9 / 2 / 2
    ),
    # nvidia.com/en-us/data-center/h100: SXM, half the figure with sparsity, half of NVLink's both directions
    "h100": Roof(bytes_per_s=3350e9, flops_per_s=989e12, memory_bytes=80 * 10**9, link_bytes_per_s=900e9 / 2),
    # nvidia.com/en-us/data-center/hgx: an eighth of eight B200, half the figure with sparsity
    "b200": Roof(bytes_per_s=7700e9, flops_per_s=2250e12, memory_bytes=180 * 10**9, link_bytes_per_s=1800e9 / 2),
}
# Devices to simulate: also those that have no kernels of ours.
SIMULATED = ROOFS | {
    # nvidia.com/en-us/data-center/a100: 80 GB SXM
    "a100": Roof(bytes_per_s=2039e9, flops_per_s=312e12, memory_bytes=80 * 10**9, link_bytes_per_s=600e9 / 2),
}
