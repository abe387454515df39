"""The error tree is what its docstring draws, and errors carry what a program can act on."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path

import pytest

from kvcache import errors
from kvcache.errors import (
    CapacityError,
    ComputationLost,
    ConfigError,
    Contradiction,
    DuplicateRequest,
    InternalError,
    InvalidTokens,
    InvariantViolated,
    KVCacheError,
    ManagerBusy,
    ManagerClosed,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfNumbers,
    OutOfSymbols,
    PinsExceeded,
    Poisoned,
    PromptTooLong,
    SnapshotError,
    StaleTables,
    TransfersNotAwaited,
    TransfersPending,
    UnknownRequest,
    Unsupported,
    UsageError,
    WrongThread,
    invariant,
)
from tests.support.places import ROOT

EXAMPLES: dict[KVCacheError, dict[str, object]] = {
    ConfigError(["a: given 1; accepted: 2", "b: missing"], "x.toml"): {
        "problems": ("a: given 1; accepted: 2", "b: missing"),
        "source": "x.toml",
    },
    DuplicateRequest("r1"): {"request_id": "r1", "in_batch": False},
    DuplicateRequest("r1", in_batch=True): {"request_id": "r1", "in_batch": True},
    UnknownRequest(7): {"request_id": 7},
    InvalidTokens("negative", 3): {"reason": "negative", "position": 3},
    InvalidTokens("no tokens at all"): {"reason": "no tokens at all", "position": None},
    WrongThread("engine", "web"): {"owner": "engine", "caller": "web"},
    ManagerBusy(): {},
    TransfersPending(): {},
    TransfersNotAwaited(): {},
    StaleTables("r1"): {"request_id": "r1"},
    ComputationLost("r1", 32): {"request_id": "r1", "computed": 32, "stuck": False},
    ManagerClosed(): {},
    Contradiction("block 7 is gone", "r1", 7): {"reason": "block 7 is gone", "request_id": "r1", "block": 7},
    SnapshotError(Path("x"), "foreign"): {"path": Path("x"), "problem": "foreign", "detail": ""},
    SnapshotError(Path("x"), "newer", "2"): {"path": Path("x"), "problem": "newer", "detail": "2"},
    SnapshotError(Path("x"), "damaged", "it ends"): {
        "path": Path("x"),
        "problem": "damaged",
        "detail": "it ends",
    },
    Unsupported("appending to a log without tokens", "start a new log"): {
        "what": "appending to a log without tokens",
        "instead": "start a new log",
    },
    OutOfBlocks(2, (5, 1), (3, 4), (256, 4096), "max_tokens"): {
        "index": 2,
        "needed": (5, 1),
        "available": (3, 4),
        "windows": (256, 4096),
        "settings": "max_tokens",
    },
    PromptTooLong(100, 64, 32, "primary_bytes", True): {
        "length": 100,
        "limit": 64,
        "window": 32,
        "settings": "primary_bytes",
        "at_once": True,
    },
    OutOfNumbers(): {},
    OutOfSymbols(3, 2): {"needed": 3, "available": 2},
    PinsExceeded(5, 4, 128): {"blocks": 5, "most": 4, "window": 128},
    NotEnoughMemory(2048, 1024, "GPU memory", "primary_blocks"): {
        "needed": 2048,
        "free": 1024,
        "where": "GPU memory",
        "lower": "primary_blocks",
    },
    InvariantViolated("a slot is in two places"): {"law": "a slot is in two places", "detail": ""},
    InvariantViolated("a slot is in two places", "slot 3"): {
        "law": "a slot is in two places",
        "detail": "slot 3",
    },
    Poisoned("KeyError: 3"): {"cause": "KeyError: 3", "interrupted": False},
}
"""An instance of every error that is raised, and its fields."""

OWN = [item for item in vars(errors).values() if inspect.isclass(item) and item.__module__ == errors.__name__]
CLASSES = [item for item in OWN if issubclass(item, Exception)]
LEAVES = [
    item for item in CLASSES if not any(other is not item and issubclass(other, item) for other in CLASSES)
]
EACH = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def drawn_parents() -> dict[str, str]:
    """Read the tree in the module's docstring: the parent of each name."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").split("::", 1)[1].splitlines():
        if found := re.match(r"    ((?:[│├└─ ]{4})*)([A-Z]\w+)", line):
            depth = len(found[1]) // 4
            above = [*above[:depth], found[2]]
            if depth:
                parents[found[2]] = above[depth - 1]
    return parents


def test_drawing_is_the_tree() -> None:
    """The tree drawn in the docstring names every class, below the class that it derives from."""
    assert drawn_parents() == {
        item.__name__: item.__bases__[0].__name__ for item in CLASSES if item is not KVCacheError
    }


def test_every_leaf_has_an_example() -> None:
    """The examples below cover every error class that has no subclass."""
    assert {type(error) for error in EXAMPLES} == set(LEAVES)


@EACH
def test_fields_survive_pickling(error: KVCacheError) -> None:
    """An error that crosses a process boundary keeps its type, its fields and its text."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert {name: getattr(back, name) for name in EXAMPLES[error]} == EXAMPLES[error]
    assert vars(back) == EXAMPLES[error]
    assert str(back) == str(error)
    assert str(error)


@EACH
def test_fields_given_by_name_survive_pickling_too(error: KVCacheError) -> None:
    """However an error was made, its arguments are its fields."""
    named = type(error)(**EXAMPLES[error])
    assert named.args == tuple(EXAMPLES[error].values())
    assert str(pickle.loads(pickle.dumps(named))) == str(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_says_what_it_means(kind: type[KVCacheError]) -> None:
    """Every class of the tree has a docstring of its own."""
    assert vars(kind).get("__doc__")


def test_config_error_is_a_value_error() -> None:
    """Code that expects pydantic's ValueError for a bad value catches a ConfigError too."""
    assert issubclass(ConfigError, ValueError)
    assert str(ConfigError(["a: missing"])) == "the configuration has 1 problem:\n  a: missing"


def test_out_of_blocks_names_only_the_groups_that_are_short() -> None:
    """The text speaks of the groups that lack blocks, not of those that have enough."""
    text = str(OutOfBlocks(2, (5, 1), (3, 4), (256, 4096)))
    assert "5 needed, 3 free or evictable in group 0 (window 256);" in text
    assert "group 1" not in text


def test_branches_report_the_parties_apart() -> None:
    """A program can treat misuse, lack of room and bugs differently with one except clause each."""
    branches = (UsageError, CapacityError, InternalError)
    assert all(sum(issubclass(leaf, branch) for branch in branches) == 1 for leaf in LEAVES)


def test_invariant_raises_only_when_broken() -> None:
    """A law that holds costs nothing; one that does not is named in the error."""
    invariant(True, "unused")
    with pytest.raises(InvariantViolated, match="two places") as caught:
        invariant(False, "a slot is in two places")
    assert caught.value.law == "a slot is in two places"


def test_every_leaf_is_raised_somewhere() -> None:
    """No error is kept that no code raises."""
    made = set()
    for file in (ROOT / "kvcache").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call | ast.Raise):
                error = node.func if isinstance(node, ast.Call) else node.exc
                made.add(error.id if isinstance(error, ast.Name) else None)
    assert {leaf.__name__ for leaf in LEAVES} - made == set()


@pytest.mark.parametrize("request_id", [10**5000, -(2**70), "a" * 10**6], ids=["huge", "large", "text"])
def test_texts_repeat_no_long_id(request_id: int | str) -> None:
    """An id of any length is told in one short line, though Python writes no integer of thousands of digits."""
    for error in (UnknownRequest(request_id), DuplicateRequest(request_id), ComputationLost(request_id, 3)):
        assert len(str(error)) < 300
