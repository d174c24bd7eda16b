"""What the entries of a cache depend on, in one word: files of another model, layout or rounding are not for it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dsjax.axes import STAGE
from dsjax.config import EngineConfig
from dsjax.runner.runner import Runner


def cache_fingerprint(folder: Path, config: EngineConfig, runner: Runner) -> str:
    """Of a checkpoint in `folder`: config.json, the weights' names, sizes and times, and how a page lies on the host.

    Weights are not read: who changes them keeping size and time has to empty the disk's folder.
    """
    spec = runner.spec
    facts: dict[str, Any] = {
        "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "weights": {f.name: (f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.glob("*.safetensors"))},
        "computed as": (config.dtype, config.weight_format, runner.target.platform),
        "unit": spec.unit_tokens,
        "stages": runner.mesh.shape[STAGE],
        "kinds": {
            kind.value: (k.num_layers, repr(k.format), k.ratio, k.window, k.entries_per_page, k.num_parts, k.tiled)
            for kind, k in spec.kinds.items()
        },
        "state": spec.state_values,
        "host": config.tiers.host_cache_dtype,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
