"""The plots of `benchmarks.scale` and `benchmarks.linear`, as SVG.  [no jax]"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsjax.errors import ConfigError

AXES = {"requests": "requests at once", "lengths": "tokens of a prompt"}
RATES = {"total_token_throughput": "prompts and answers", "output_throughput": "answers"}


def plot_sweep(folder: Path, name: str, runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> Path:
    """Medians of the runs of each point, with their ranges, as `scale-NAME.svg` in a folder.

    Raises ConfigError without matplotlib.
    """
    figure, axes = _figure()
    for key, label in RATES.items():
        rates = {point: [run[key] for run in some] for point, some in runs.items()}
        middle = {point: statistics.median(some) for point, some in rates.items()}
        below = [middle[point] - min(some) for point, some in rates.items()]
        above = [max(some) - middle[point] for point, some in rates.items()]
        axes.errorbar(list(middle), list(middle.values()), [below, above], marker="o", capsize=3, label=label)
    axes.set_ylabel("tokens/s")
    return _save(folder / f"scale-{name}.svg", figure, axes, list(runs), AXES[name])


def plot_parts(folder: Path, name: str, label: str, parts: Mapping[str, Mapping[int, float]]) -> Path:
    """Milliseconds of parts of a step by the tokens behind it: parts[part][tokens]. -> the file, as `plot_sweep`."""
    figure, axes = _figure()
    for part, by_context in parts.items():
        axes.plot(list(by_context), list(by_context.values()), marker="o", label=part)
    axes.set_ylabel("ms")
    points = sorted({context for by_context in parts.values() for context in by_context})
    return _save(folder / f"scale-{name}.svg", figure, axes, points, label)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("plots needs matplotlib, which the extra `plots` installs: pip install .[plots]") from error
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    return figure, figure.subplots()


def _save(path: Path, figure: Any, axes: Any, points: Sequence[int], label: str) -> Path:
    from matplotlib import rc_context  # pyright: ignore[reportMissingImports]

    axes.set_xscale("log", base=2)
    axes.set_xticks(points, [f"{point // 1024}k" if point % 1024 == 0 else str(point) for point in points])
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # the same numbers give the same file
    with rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return path
