"""Caps that are kept by a test, because reviews tire: sizes, docstrings, and no stray prints."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from events.types import AnyEvent
from tests.support.places import ROOT

PACKAGES = ("kvcache", "events", "sinks", "cuda_ops")
DIRECTORIES = (*PACKAGES, "tests", "examples", "benchmarks")
FUNCTION_LINES = 48
TEST_LINES = 70
FILE_LINES = 1000
EVENTS = {event.__name__ for event in typing.get_args(AnyEvent)}
MAY_PRINT = ("kvcache/cli/", "sinks/stdout.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def findings(path: str, source: str) -> list[str]:
    """What is wrong with a file, as `path:line: reason`."""
    tree = ast.parse(source)
    return [f"{path}:{line}: {reason}" for line, reason in sorted(_findings(path, source, tree))]


def _findings(path: str, source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    in_tests, in_package = path.startswith("tests/"), path.startswith(tuple(f"{name}/" for name in PACKAGES))
    if not ast.get_docstring(tree):
        yield 1, "the module has no docstring"
    if not in_tests and source.count("\n") > FILE_LINES:
        yield 1, f"the file has more than {FILE_LINES} lines"
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from _in_function(node, in_tests)
        if in_package and not path.startswith(MAY_PRINT) and _prints(node):
            yield (
                getattr(node, "lineno", 0),
                "prints; the library reports through events, errors and structlog",
            )
        if in_package and isinstance(node, ast.Call) and _is_event_by_position(node):
            yield node.lineno, "builds an event by position, where two columns can be swapped unseen"


def _in_function(node: Function, in_tests: bool) -> Iterator[tuple[int, str]]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    most = TEST_LINES if in_tests else FUNCTION_LINES
    if lines > most:
        yield node.lineno, f"{node.name} has {lines} lines, more than {most}"
    if in_tests and node.name.startswith("test_") and not ast.get_docstring(node):
        yield node.lineno, f"{node.name} does not say what it proves"


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _is_event_by_position(call: ast.Call) -> bool:
    """Whether an event is made with more than one field that is not named; one alone cannot be swapped."""
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
    return name in EVENTS and (len(call.args) > 1 or any(isinstance(each, ast.Starred) for each in call.args))


def files(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_house_is_tidy(directory: str) -> None:
    """Every file keeps to the caps on size, has its docstring and prints only where people are meant to read."""
    found = [
        finding
        for file in files(directory)
        for finding in findings(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_tell_type_checkers_that_they_are_typed(package: str) -> None:
    """Each package carries the marker without which type checkers ignore its annotations."""
    assert (ROOT / package / "py.typed").is_file()


DOC = '"""A module."""\n'


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("kvcache/a.py", DOC, []),
        ("kvcache/a.py", "x = 1\n", ["kvcache/a.py:1: the module has no docstring"]),
        ("kvcache/a.py", DOC + "x = 1\n" * 999, []),
        ("kvcache/a.py", DOC + "x = 1\n" * 1000, ["kvcache/a.py:1: the file has more than 1000 lines"]),
        ("tests/a.py", DOC + "x = 1\n" * 1000, []),
        ("events/a.py", DOC + "def f():\n" + "    x = 1\n" * 47, []),
        (
            "events/a.py",
            DOC + "def f():\n" + "    x = 1\n" * 48,
            ["events/a.py:2: f has 49 lines, more than 48"],
        ),
        (
            "sinks/a.py",
            DOC + "print()\n",
            ["sinks/a.py:2: prints; the library reports through events, errors and structlog"],
        ),
        ("sinks/a.py", DOC + "Gap(1, last_seq=2, reason='')\n", []),
        (
            "sinks/a.py",
            DOC + "ev.Gap(1, 2, '')\n",
            ["sinks/a.py:2: builds an event by position, where two columns can be swapped unseen"],
        ),
        ("sinks/stdout.py", DOC + "print()\n", []),
        ("kvcache/cli/run.py", DOC + "print()\n", []),
        ("examples/a.py", DOC + "print()\n", []),
        ("tests/a.py", DOC + "def test_it(): pass\n", ["tests/a.py:2: test_it does not say what it proves"]),
        ("tests/a.py", DOC + "async def test_it(): 'A fact.'\n", []),
    ],
)
def test_check_finds_what_it_should(path: str, source: str, found: list[str]) -> None:
    """Each rule reports a file that breaks it by one, and is silent about one that just keeps it."""
    assert findings(path, source) == found
