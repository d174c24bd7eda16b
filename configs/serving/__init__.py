"""Serving configurations: module NAME here has `config()`, which returns an EngineConfig.  [no jax]"""

from __future__ import annotations

import importlib
import pkgutil

from dsjax.config import EngineConfig
from dsjax.errors import ConfigError


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> EngineConfig:
    """The config that `--config=NAME` means. Raises ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError(f"config={name!r} is unknown: configs/serving has {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").config()
