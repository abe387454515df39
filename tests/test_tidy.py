"""Rules that are kept by a test, because reviews tire: sizes, docstrings, no stray prints, what tests may import."""

from __future__ import annotations

import ast
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import pytest

from events.types import AnyEvent
from tests.support.places import ROOT
from tests.support.sources import (
    DIRECTORIES,
    PACKAGES,
    files,
    imported,
    modules,
    parsed,
    parsed_file,
    run_at_import,
)

FUNCTION_LINES = 48
TEST_LINES = 70
FILE_LINES = 1000
EVENTS = {event.__name__ for event in typing.get_args(AnyEvent)}
MAY_PRINT = ("kvcache/cli/", "sinks/stdout.py")
MAY_SLEEP = {
    "tests/events/test_diagnostics.py": "a child process waits until a sink is given up",
    "tests/sinks/test_runner.py": "between the steps of an engine sinks get their turn",
    "tests/support/delays.py": "threads are late on purpose",
    "tests/support/engines/killed.py": "a process works for a while before it is killed",
    "tests/support/feeds/scraping.py": "Prometheus is asked no more often than it fetches",
    "tests/support/servers/chaos.py": "misfortunes have a length",
    "tests/support/waiting.py": "others work between two looks at a state",
}
"""Tests that give something time instead of waiting for a state, and why that is right."""
SLEEP = "time." + "sleep("
EVENT_FIELDS = {name for event in typing.get_args(AnyEvent) for name in event.__struct_fields__}
MAY_ASK = {
    "events/diagnostics.py": "an application configures loggers and streams of any kind",
    "events/log/durable.py": "what the system offers to sync a file",
    "events/log/segments.py": "error numbers that only some systems have",
    "kvcache/__init__.py": "loaders and modules of whatever distribution has the package's name",
    "kvcache/cli/subscribe/sources.py": "what reads ZeroMQ and what reads brokers count different things",
    "kvcache/device/secondary_file.py": "what the system offers to reserve a file's room",
    "kvcache/device/transfers.py": "an engine's own copier, which may delegate its methods",
    "kvcache/integrations/sglang/attached.py": "objects of SGLang have other attributes by its version and their kind",
    "kvcache/integrations/transformers/shape.py": "configurations and models have other attributes by their kind",
    "kvcache/integrations/vllm/attached.py": "objects of vLLM have other attributes by its version and their kind",
    "kvcache/integrations/vllm/groups.py": "objects of vLLM have other attributes by its version and their kind",
    "kvcache/integrations/vllm/recording.py": "objects of vLLM have other attributes by its version and their kind",
    "kvcache/integrations/vllm/plugin.py": "objects of vLLM have other attributes by its version and their kind",
    "sinks/registry.py": "what makes a sink of another package may be a plain function",
    "sinks/router/feed.py": "only some transports refuse peers",
}
"""Modules of the product that ask for an attribute by its name, which no protocol or base class could promise, and why.

A field of an event may be asked for everywhere: its many types have different ones.
"""
HEAVY = ("torch", "transformers")
"""Libraries that take seconds to load, which workers that run only the core's tests need not."""
NOT_FOR_TESTS = re.compile(r"test_\w+|conftest")
OF_A_TEST = re.compile(
    r"(?:(?:from|import)\s+|^)tests(?:\.\w+)*\.(?:test_\w+|conftest)(?:\s|$)"
    r"|from\s+tests[.\w]*\s+import\b.*\b(?:test_\w+|conftest)\b"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def findings(path: str, source: str) -> list[str]:
    """What is wrong with a file, as `path:line: reason`."""
    tree = parsed(source)
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
        if in_tests and isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Constant):
            yield from _of_tests(path, node)
        if in_package and not path.startswith(MAY_PRINT) and _prints(node):
            yield (
                getattr(node, "lineno", 0),
                "prints; the library reports through events, errors and structlog",
            )
        if in_package and path not in MAY_ASK and _asks_for_attribute(node):
            yield (
                node.lineno,
                "asks for an attribute by its name; a protocol or a base class says that it is there",
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


def _of_tests(path: str, node: ast.AST) -> Iterator[tuple[int, str]]:
    """Look at a module of tests as well as at the code in its strings, which other processes run."""
    line = getattr(node, "lineno", 0)
    names = [part for name in imported([node]) if name.startswith("tests.") for part in name.split(".")]
    if any(map(NOT_FOR_TESTS.fullmatch, names)) or OF_A_TEST.search(_text(node)):
        yield line, "imports a module of tests; what tests share is in tests/support"
    if path not in MAY_SLEEP and _sleeps(node):
        yield line, "sleeps; tests wait for a state, by tests.support.waiting"


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _sleeps(node: ast.AST) -> bool:
    return (
        SLEEP in _text(node)
        or "time.sleep" in imported([node])
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) == ("time", "sleep")
        )
    )


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def _asks_for_attribute(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it is `getattr` with a name that is written there, but for a field of an event."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"):
        return False
    of, name = node.args[0], _text(node.args[1])
    is_event = isinstance(of, ast.Name) and of.id == "event" and name in EVENT_FIELDS
    return bool(name) and not is_event


def _is_event_by_position(call: ast.Call) -> bool:
    """Whether an event is made with more than one field that is not named; one alone cannot be swapped."""
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
    return name in EVENTS and (len(call.args) > 1 or any(isinstance(each, ast.Starred) for each in call.args))


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_house_is_tidy(directory: str) -> None:
    """Every file keeps to the caps on size, has its docstring and prints only where people are meant to read."""
    found = [
        finding
        for file in files(directory)
        for finding in findings(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_who_may_sleep_does() -> None:
    """No exception is left whose reason has gone."""
    assert [path for path in MAY_SLEEP if not any(map(_sleeps, ast.walk(parsed_file(ROOT / path))))] == []


def test_who_may_ask_for_attributes_does() -> None:
    """No exception is left whose reason has gone."""
    trees = {path: parsed_file(ROOT / path) for path in MAY_ASK}
    assert [path for path, tree in trees.items() if not any(map(_asks_for_attribute, ast.walk(tree)))] == []


def loading(names: tuple[str, ...], edges: dict[str, set[str]]) -> set[str]:
    """Return the modules whose import loads one of these, itself or by others that it imports."""
    importers = defaultdict(set)
    for module, others in edges.items():
        for other in others:
            parts = other.split(".")
            # With a module its packages are imported.
            for end in range(len(parts)):
                importers[".".join(parts[: end + 1])].add(module)
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        new = importers[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_only_tests_of_tensors_load_torch() -> None:
    """No other module of tests loads it, or Transformers, by being imported; what support has for them may."""
    known = modules(DIRECTORIES)
    edges = {name: imported(run_at_import(parsed_file(file))) for name, file in known.items()}
    heavy = loading(HEAVY, edges)
    assert any(name.startswith("tests.tensors.") for name in heavy)
    collected = [name for name in known if NOT_FOR_TESTS.fullmatch(name.rpartition(".")[2])]
    assert [name for name in collected if name in heavy and not name.startswith("tests.tensors.")] == []


def test_what_loads_a_library_is_seen() -> None:
    """By way of others, and of the package that it lies in."""
    edges = {
        "a": {"torch.nn"},
        "b": {"a.something"},
        "c.d": {"x"},
        "c": {"b"},
        "e": {"c.d.f"},
        "g": {"torchvision"},
    }
    assert loading(("torch",), edges) == {"a", "b", "c", "e"}


def lone_subclasses(sources: Iterable[str]) -> dict[str, str]:
    """Concrete classes with exactly one subclass, and that one; of exceptions, protocols and abstract bases none."""
    nodes = [
        node for source in sources for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: [_base(base) for base in node.bases] for node in nodes}
    exempt = {node.name for node in nodes if "abstractmethod" in ast.dump(node)}
    exempt |= {name for name in bases if {"ABC", "Protocol"} & set(bases[name]) or _is_exception(name, bases)}
    children = defaultdict(list)
    for name, own in bases.items():
        for base in set(own) & bases.keys() - exempt:
            children[base].append(name)
    return {name: found[0] for name, found in children.items() if len(found) == 1}


def _base(node: ast.expr) -> str:
    """Return the last part of a name, whatever it is subscripted with."""
    if isinstance(node, ast.Subscript):
        return _base(node.value)
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _is_exception(name: str, bases: dict[str, list[str]]) -> bool:
    return name.endswith(("Error", "Exception")) or any(
        _is_exception(base, bases) for base in bases.get(name, ())
    )


def test_no_class_is_there_for_one_subclass() -> None:
    """A class and its only subclass are one thing in two places: one class, or one that has the other."""
    sources = [file.read_text(encoding="utf-8") for package in PACKAGES for file in files(package)]
    found = lone_subclasses(sources)
    lone = [f"{name} has one subclass, {child}" for name, child in found.items()]
    assert not lone, f"fold each of these into one class, or let one have the other: {'; '.join(lone)}"


def test_lone_subclasses_are_found() -> None:
    """Whichever file has them; not those of abstract bases, protocols and exceptions, and no second one."""
    found = lone_subclasses(
        [
            "class A: ...\nclass B(x.A): ...\nclass C(Generic[T]): ...\nclass D(C[int]): ...",
            "class E(C[str]): ...\nclass F(ABC): ...\nclass G(F): ...\nclass H(Exception): ...\nclass I(H): ...",
            "class J:\n @abstractmethod\n def f(self): ...\nclass K(J): ...\nclass L(B): ...",
        ]
    )
    assert found == {"A": "B", "B": "L"}


def classes(paths_and_sources: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The classes of some files, those inside others too: name to the files that have one."""
    found = defaultdict(set)
    for path, source in paths_and_sources:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
    return dict(found)


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever reads a name of a class in the product knows which module it is of."""
    product = [file for package in PACKAGES for file in files(package)]
    sources = [(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in product]
    twice = {name: sorted(paths) for name, paths in classes(sources).items() if len(paths) > 1}
    assert twice == {}


def test_classes_of_one_name_are_found() -> None:
    """In two files, also inside a function; not twice in one."""
    found = classes([("a", "class A: ...\nclass B: ...\nclass B: ..."), ("b", "def f():\n class A: ...")])
    assert found == {"A": {"a", "b"}, "B": {"a"}}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_marked_as_typed(package: str) -> None:
    """Each package carries the marker without which type checkers ignore its annotations."""
    assert (ROOT / package / "py.typed").is_file()


DOC = '"""A module."""\n'
A = "tests.a"


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
        (
            "sinks/a.py",
            DOC + "getattr(sink, 'name', None)\n",
            [
                "sinks/a.py:2: asks for an attribute by its name; a protocol or a base class says that it is there"
            ],
        ),
        ("sinks/a.py", DOC + "getattr(event, 'handle', None)\ngetattr(sink, name)\n", []),
        ("tests/a.py", DOC + "getattr(sink, 'name', None)\n", []),
        ("sinks/stdout.py", DOC + "print()\n", []),
        ("kvcache/cli/run.py", DOC + "print()\n", []),
        ("examples/a.py", DOC + "print()\n", []),
        ("tests/a.py", DOC + "def test_it(): pass\n", ["tests/a.py:2: test_it does not say what it proves"]),
        ("tests/a.py", DOC + "async def test_it(): 'A fact.'\n", []),
        ("tests/a.py", DOC + "from tests.support import x\n", []),
        ("tests/a.py", DOC + f"x = 'python -m {A}.test_b writes it'\n", []),
        ("kvcache/a.py", DOC + f"import time\n{SLEEP}1)\n", []),
        ("tests/support/waiting.py", DOC + f"import time\n{SLEEP}1)\n", []),
        *(
            (
                "tests/a.py",
                DOC + line,
                ["tests/a.py:2: imports a module of tests; what tests share is in tests/support"],
            )
            for line in (
                f"from {A}.test_b import x\n",
                f"from {A} import test_b\n",
                f"import {A}.conftest\n",
                f"x = 'import y; from {A}.test_b import x'\n",
                f"x = 'from {A} import y, test_b'\n",
                f"x = 'python', '-m', '{A}.test_b'\n",
            )
        ),
        *(
            (
                "tests/a.py",
                DOC + line,
                ["tests/a.py:2: sleeps; tests wait for a state, by tests.support.waiting"],
            )
            for line in (f"{SLEEP}1)\n", "from time import sleep\n", f"x = 'import time; {SLEEP}1)'\n")
        ),
    ],
)
def test_check_finds_what_it_should(path: str, source: str, found: list[str]) -> None:
    """Each rule reports a file that breaks it by one, and is silent about one that just keeps it."""
    assert findings(path, source) == found
