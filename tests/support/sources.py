"""The project's own source, for tests that look at it: parsed once, and which module imports which."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.support.places import ROOT

PACKAGES = ("events", "sinks", "cuda_ops", "kvcache")
DIRECTORIES = (*PACKAGES, "tests", "examples", "benchmarks")


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def parsed_file(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


def files(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


def modules(directories: Iterable[str] = PACKAGES) -> dict[str, Path]:
    """Return the files of all modules by their names."""
    found = {}
    for directory in directories:
        for file in files(directory):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = file
    return found


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the modules that these import, and what they take from them as if it were modules, too."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside, but for the bodies of functions, and what only type checkers see."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if (
            isinstance(inner, ast.If)
            and isinstance(inner.test, ast.Name)
            and inner.test.id == "TYPE_CHECKING"
        ):
            continue
        yield inner
        yield from run_at_import(inner)
