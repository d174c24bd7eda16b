"""Serving configurations by name. A module NAME here is a preset: its CHANGES, in the form of a file.  [no jax]

Presets of one kind leave the others' fields alone, so that they can be combined, as in `--config=v6e,aggressive`:

| kind | presets |
|---|---|
| a model with its machine | nano |
| what is promised to users | conservative, balanced, aggressive |
| where it runs | development, production |
| hardware, sized for DeepSeek-V4-Flash | v5e, v6e, v5p, tpu7x, a100, h100, b200 |
| a processor | cpu |
"""

from __future__ import annotations

import importlib
import pkgutil

from configs import files
from dsjax.config import EngineConfig
from dsjax.errors import ConfigError

DEFAULT = EngineConfig(model="dsjax-nano")


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(text: str, base: EngineConfig = DEFAULT) -> EngineConfig:
    """The config that `--config=NAME,FILE.yaml,...` means: presets and files, applied to `base` from left to right.

    Raises ConfigError for an unknown name, or for what is wrong in a file.
    """
    for source in filter(None, text.split(",")):
        if source.endswith(files.SUFFIXES):
            changes = files.read(source)
        elif source in names():
            changes = importlib.import_module(f"{__name__}.{source}").CHANGES
        else:
            raise ConfigError(
                f"config={source!r} is unknown: configs/serving has {', '.join(names())}; a file ends in "
                f"{', '.join(files.SUFFIXES)}"
            )
        base = files.apply(base, changes, source)
    return base
