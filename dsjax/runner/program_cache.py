"""Compiled programs on disk, so that a second start neither traces nor compiles.

JAX's own cache finds a program by its text, so a start that finds everything there still traces and lowers it all, in
Python and on one core, which takes longer than loading it. Here a program's file is named by a hash of what its text
and its compilation depend on: the facts its owner knows, and what `_surroundings` adds.

A file is the SHA-256 of the rest, then what `serialize_executable` makes of the program, pickled and compressed. It is
written whole under another name and then renamed, so that several servers can share the folder. Like JAX's, the cache
is trusted: who can write to the folder can run code in the servers that use it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from pallas_kernels import native

log = logging.getLogger("dsjax")

SUFFIX, TEMPORARY = ".program", ".part"
MAX_BYTES = 4 << 30  # of a folder: hundreds of the largest programs
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_ABANDONED_S = 3600.0  # a temporary file so old is of a process that was killed while it wrote


class ProgramCache:
    """Of programs for `devices`, those of this process alone; `facts` are what all of a caller's programs depend on.

    A fact counts by its `repr`. Nothing here raises: a file that cannot be used is as good as none, and a program that
    cannot be written is compiled again by the next start.
    """

    def __init__(self, folder: Path, devices: Sequence[Any], facts: Iterable[object], max_bytes: int = MAX_BYTES):
        self.folder, self.max_bytes = folder, max_bytes
        self.num_loaded = self.num_damaged = 0
        self._devices = list(devices)
        if self._devices[0].platform == "cpu":
            native.register()  # a program that is loaded calls it by name
        self._common = _hash([*_surroundings(), *_of_devices(self._devices), *facts])

    def path(self, facts: Iterable[object]) -> Path:
        """Where a program with these facts of its own is, or would be."""
        return self.folder / f"{_hash([self._common, *facts])}{SUFFIX}"

    def load(self, path: Path) -> jax.stages.Compiled | None:
        """The program; None where there is none, or none that can be used."""
        try:
            data = path.read_bytes()
        except OSError:
            return None
        checksum, packed = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        try:
            if hashlib.sha256(packed).digest() != checksum:
                raise ValueError("its checksum is wrong")
            program = serialize_executable.deserialize_and_load(
                *pickle.loads(zlib.decompress(packed)),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except Exception as error:  # whatever unpickling and the runtime make of a file that does not fit
            self.num_damaged += 1
            log.warning("compiled program %s cannot be used and is compiled again: %s", path, error)
            return None
        self.num_loaded += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # as the most recently used
        return program

    def save(self, path: Path, program: jax.stages.Compiled) -> None:
        try:
            packed = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1)
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=TEMPORARY, delete=False) as file:
                try:
                    file.write(hashlib.sha256(packed).digest() + packed)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except Exception as error:  # not every runtime can serialise every program
            log.warning("compiled program %s is not kept for the next start: %s", path, error)

    def trim(self) -> None:
        """Deletes the least recently used files beyond `max_bytes`, and what a killed process left half written."""
        kept = 0
        for path, stat in sorted(_files(self.folder), key=lambda item: -item[1].st_mtime_ns):
            if path.suffix == SUFFIX:
                kept += stat.st_size
                unwanted = kept > self.max_bytes
            else:
                unwanted = path.suffix == TEMPORARY and time.time() - stat.st_mtime > _ABANDONED_S
            if unwanted:
                with contextlib.suppress(OSError):
                    path.unlink()


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Those that are still there when they are looked at: other processes may be deleting, too."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append((path, path.stat()))
    return found


def _hash(facts: Iterable[object]) -> str:
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()


def _surroundings() -> list[object]:
    """What any program depends on besides what it is of: code, versions, and the settings of JAX and XLA."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")}
    settings = {name: value for name, value in sorted(jax.config.values.items()) if "cache" not in name}
    environment = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return [_hash_of_sources(), sys.version, versions, settings, environment]


@functools.cache
def _hash_of_sources() -> str:
    """Of all of dsjax and its kernels: which of the modules a program does not depend on is not worth knowing."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for package in ("dsjax", "pallas_kernels"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _of_devices(devices: Sequence[Any]) -> list[object]:
    client = devices[0].client
    kinds = [(d.id, d.platform, d.device_kind) for d in devices]
    facts: list[object] = [kinds, client.platform_version, client.device_count()]
    if devices[0].platform == "cpu":  # compiled for this CPU's instructions, and split over its cores
        facts += [platform.machine(), _cpu_model(), os.cpu_count()]
    return facts


def _cpu_model() -> tuple[str, ...]:
    """The CPU's name and the instructions it has, where the system says so."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        return tuple(sorted({line for line in lines if line.startswith(wanted)}))
    return (platform.processor(),)
