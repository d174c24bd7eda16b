"""The golden sets on meshes of eight devices: equal to one device, logits and greedy tokens, in every mode of a mesh.

A mode is a size of `kv_parallel` with experts sliced or whole. All that a set's sizes allow are named here. Of these
`chosen()` runs every mode of every mesh on some set, and every set on every mesh: what splits an axis does so for each
layer by itself, so a mode that is right on one set of layers and a mesh that is right for a set leave little to find in
their product, which would take an hour.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from dsjax.config import ModelConfig, ParallelConfig
from dsjax.errors import ConfigError
from dsjax.model.stages import Stages
from dsjax.sharding import Rules
from dsjax.verify import read_golden, recording_runner, verify_mode
from tests.golden_sets import NAMES, golden
from tests.model.test_golden_full import ATOL

WITH_MTP = ("g7_mtp", "q1_fp8fp4")


class Mesh(NamedTuple):
    stage: int
    data: int
    model: int


class Way(NamedTuple):
    """A mesh and its mode."""

    mesh: Mesh
    kv: int
    experts: bool  # whole ones, over all devices

    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            pipeline_parallel_size=self.mesh.stage,
            data_parallel_size=self.mesh.data,
            tensor_parallel_size=self.mesh.model,
            kv_parallel=self.kv,
            expert_parallel=self.experts,
        )

    def __str__(self) -> str:
        stage, data, model = self.mesh
        stages = f"{stage}x" if stage > 1 else ""
        return f"{stages}{data}x{model}-kv{self.kv}{'-experts' if self.experts else ''}"


FLAT = [Mesh(1, 1, 8), Mesh(1, 2, 4), Mesh(1, 4, 2), Mesh(1, 8, 1)]
STAGED = [Mesh(2, 1, 4), Mesh(2, 2, 2), Mesh(2, 4, 1), Mesh(4, 1, 2), Mesh(4, 2, 1)]
WAYS = [
    Way(mesh, kv, experts)
    for mesh, kv, experts in itertools.product(FLAT + STAGED, (1, 2, 4, 8), (False, True))
    if mesh.model % kv == 0
]

# By tensor_parallel_size, what kv_parallel can be: tensor_parallel_size / kv_parallel divides the groups of heads.
GROUPS_1 = {8: (8,), 4: (4,), 2: (2,), 1: (1,)}
GROUPS_2 = {8: (4, 8), 4: (2, 4), 2: (1, 2), 1: (1,)}
GROUPS_4 = {8: (2, 4, 8), 4: (1, 2, 4), 2: (1, 2), 1: (1,)}


class Applies(NamedTuple):
    """What a set's sizes allow."""

    kv: dict[int, tuple[int, ...]]
    stages: tuple[int, ...]  # at most one a layer
    experts: tuple[int, ...]  # stages that leave so many devices that they divide the experts
    num_ways: int

    def to(self, way: Way) -> bool:
        stage, _, model = way.mesh
        return way.kv in self.kv[model] and stage in self.stages and (not way.experts or stage in self.experts)


APPLIES = {
    "g1_sliding": Applies(GROUPS_2, (1, 2), (1, 2), 24),
    "g2_csa": Applies(GROUPS_4, (1, 2), (1, 2), 30),
    "g3_hca": Applies(GROUPS_2, (1, 2), (1, 2), 24),
    "g4_mixed": Applies(GROUPS_2, (1, 2, 4), (4,), 18),  # 6 experts: not over 8 or 4 devices
    "g5_long": Applies(GROUPS_2, (1, 2, 4), (4,), 18),
    "g6_ragged": Applies(GROUPS_1, (1, 2, 4), (4,), 11),  # 3 heads
    "g7_mtp": Applies(GROUPS_2, (1, 2, 4), (4,), 18),
    "q1_fp8fp4": Applies(GROUPS_2, (1, 2), (2,), 17),  # 4 experts
}


def applies(config: ModelConfig, way: Way) -> bool:
    """Whether the engine takes the model on this mesh in this mode."""
    try:
        Rules.of(config, way.parallel())
        Stages.of(config, way.mesh.stage)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_what_applies(name):
    config = ModelConfig.from_dir(golden(name))
    expected = [way for way in WAYS if APPLIES[name].to(way)]
    assert [way for way in WAYS if applies(config, way)] == expected
    assert len(expected) == APPLIES[name].num_ways


def _covers(way: Way) -> object:
    """What must run on some set: every mode of a flat mesh; on a staged one, either way of placing experts."""
    return way if way.mesh in FLAT else (way.mesh, way.experts)


def chosen() -> list[tuple[str, Way]]:
    """What runs: all of `_covers`, and every set on each of the four flat meshes and on a staged one.

    Always the set and the mode that have run least, so that the work is spread over them.
    """
    runs: list[tuple[str, Way]] = []

    def add(candidates: list[tuple[str, Way]]) -> None:
        names, ways = Counter(name for name, _ in runs), Counter(way for _, way in runs)
        on_mesh = Counter((name, way.mesh) for name, way in runs)
        kv = Counter((way.mesh in FLAT, way.kv) for _, way in runs)
        runs.append(
            min(
                candidates,
                key=lambda c: (on_mesh[c[0], c[1].mesh], ways[c[1]], kv[c[1].mesh in FLAT, c[1].kv], names[c[0]]),
            )
        )

    def of(ways: Iterable[Way]) -> list[tuple[str, Way]]:
        return [(name, way) for way in ways for name in NAMES if APPLIES[name].to(way)]

    pickiest_first = sorted(WAYS, key=lambda way: len(of([way])))
    for what in dict.fromkeys(_covers(way) for way in pickiest_first if of([way])):
        if all(_covers(way) != what for _, way in runs):
            add(of(way for way in WAYS if _covers(way) == what))
    for meshes, name in itertools.product([*([mesh] for mesh in FLAT), STAGED], NAMES):
        if not any(name == other and way.mesh in meshes for other, way in runs):
            add([run for run in of(way for way in WAYS if way.mesh in meshes) if run[0] == name])
    return sorted(runs)


def test_what_is_chosen():
    runs = chosen()
    possible = [way for way in WAYS if any(a.to(way) for a in APPLIES.values())]
    assert {way for _, way in runs} >= {way for way in possible if way.mesh in FLAT}
    assert {_covers(way) for _, way in runs} == {_covers(way) for way in possible}
    assert {way.kv for _, way in runs if way.mesh in STAGED} == {1, 2, 4}
    for name in NAMES:
        meshes = {way.mesh for other, way in runs if other == name}
        assert meshes >= set(FLAT) and meshes & set(STAGED)
    assert len(runs) == len(set(runs)) == 45


EVERYDAY = [
    ("g7_mtp", Way(Mesh(1, 2, 4), 2, False)),  # every kind of layer, hash routing, and the MTP block
    ("q1_fp8fp4", Way(Mesh(2, 2, 2), 2, True)),  # everything split at once
]


def of_ci() -> list[tuple[str, Way]]:
    """Of the chosen runs those that CI has time for: a run of each set, two sets on each flat mesh, and both numbers
    of stages. All of them are `pytest -m matrix`."""
    left = [run for run in chosen() if run not in EVERYDAY]
    wanted = [(name, (FLAT[i % len(FLAT)],)) for i, name in enumerate(NAMES)]
    wanted += [("g2_csa", [m for m in STAGED if m.stage == 2]), ("g4_mixed", [m for m in STAGED if m.stage == 4])]
    runs = []
    for name, meshes in wanted:
        runs += [run for run in left if run[0] == name and run[1].mesh in meshes][:1]
    return runs


def _params():
    in_ci, params = of_ci(), [pytest.param(*run, id=f"{run[0]}-{run[1]}") for run in EVERYDAY]
    for run in chosen():
        if run not in EVERYDAY:
            mark = pytest.mark.slow if run in in_ci else pytest.mark.matrix
            params.append(pytest.param(*run, id=f"{run[0]}-{run[1]}", marks=mark))
    return params


def test_what_ci_runs():
    runs = of_ci()
    assert {name for name, _ in runs} == set(NAMES) and {way.mesh for _, way in runs} >= set(FLAT)
    assert 8 <= len(runs) <= 10


@pytest.mark.parametrize(("name", "way"), _params())
def test_equal_to_one_device(name, way):
    """Prompts whole, several in a step, and token by token. Only the largest shapes, since compiling is what costs:
    rows and tokens that are padding must do nothing, and on several data shards there are always some."""
    folder = golden(name)
    config, prompts = ModelConfig.from_dir(folder), read_golden(folder)
    longest = max(len(p.ids) + len(p.greedy_ids) for p in prompts)
    runner, max_model_len = recording_runner(
        folder, config, longest, with_mtp=name in WITH_MTP, parallel=way.parallel()
    )
    buckets = runner.runner.buckets
    buckets.decode, buckets.mixed = buckets.decode[-1:], buckets.mixed[-1:]
    # Single tokens of short prompts only: steps of the decode shape are most of mode paged too. Of stages they add
    # nothing to its last steps, in which all micro-batches but one are empty.
    by_token = way.mesh in FLAT and max(len(p.ids) for p in prompts) <= 200
    for mode in ("paged", "token") if by_token else ("paged",):
        results = list(verify_mode(mode, runner, config, max_model_len, prompts))
        assert len(results) == len(prompts)
        assert [r for r in results if not r.passes(ATOL)] == []
        assert all((r.mtp_difference is not None) == (name in WITH_MTP) for r in results)
