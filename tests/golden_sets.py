"""Where the golden sets are: copies of some beside this file, all of them in a `shared/golden` beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "tests" / "golden"
ALL = ROOT.parent / "shared" / "golden"

# Must be found under CI; elsewhere a checkout alone has only the copies.
NAMES = ("g1_sliding", "g2_csa", "g3_hca", "g4_mixed", "g5_long", "g6_ragged", "g7_mtp", "q1_fp8fp4")


def sets() -> list[Path]:
    """The folder of every golden set there is, by name; a set that is in both places once, as the copy."""
    found: dict[str, Path] = {}
    for place in (ALL, COPIES):
        found.update({config.parent.name: config.parent for config in place.glob("*/config.json")})
    return [found[name] for name in sorted(found)]


def golden(name: str) -> Path:
    """The folder of golden set `name`; skips the calling test where it is not there, and fails it under CI."""
    for folder in sets():
        if folder.name == name:
            return folder
    if os.environ.get("CI") == "true":
        pytest.fail(f"golden set {name} is in neither {COPIES} nor {ALL}, and CI=true needs every set")
    pytest.skip(f"golden set {name} is in neither {COPIES} nor {ALL}")


def check_complete() -> None:
    """Fails the calling test if CI=true and a set is not there, so that CI cannot pass by having nothing to compare."""
    missing = set(NAMES) - {folder.name for folder in sets()}
    if os.environ.get("CI") == "true" and missing:
        pytest.fail(f"CI=true needs every golden set in {ALL}; not there: {', '.join(sorted(missing))}")
