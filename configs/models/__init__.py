"""Model configurations by name.  [no jax]"""

from __future__ import annotations

from collections.abc import Callable

from configs.models import bench, dsjax_nano, flash, pro, tiny
from dsjax.config import ModelConfig

MODELS: dict[str, Callable[[], ModelConfig]] = {
    "deepseek-v4-flash": flash.deepseek_v4_flash,
    "deepseek-v4-pro": pro.deepseek_v4_pro,
    "bench-60m": bench.bench_60m,
    "dsjax-nano": dsjax_nano.dsjax_nano,
    "tiny-mixed": tiny.tiny_mixed,
}
