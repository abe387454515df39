"""The errors of events: fields, words, and travelling between processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import events.errors
from events.errors import (
    EventDecodeError,
    EventsError,
    LogBusy,
    LogDamaged,
    LogError,
    LogExists,
    LogLocked,
    LogOfOtherKind,
    LogOutdated,
    LogTooNew,
    LogUnavailable,
    LogWriteFailed,
    NotALog,
    NotARegularFile,
    UnsafeFile,
    ZstdMissing,
)

PATH = Path("/logs/engine")
EXAMPLES: list[tuple[EventsError, dict[str, object], str]] = [
    (EventDecodeError("no batch"), {"reason": "no batch"}, "no batch"),
    (
        UnsafeFile(PATH, "others can write it", "chmod o-w it"),
        {"path": PATH, "reason": "others can write it", "advice": "chmod o-w it"},
        "is not used: others can write it; chmod o-w it",
    ),
    (NotARegularFile(PATH), {"path": PATH}, "it is not a regular file; remove it"),
    (LogExists(PATH), {"path": PATH}, "resume=True"),
    (LogBusy(PATH, "process 7"), {"path": PATH, "holder": "process 7"}, "maintained by process 7"),
    (LogLocked(PATH, "process 7"), {"path": PATH, "holder": "process 7"}, "by process 7"),
    (
        NotALog(PATH),
        {"path": PATH, "to_write": False},
        "not a log directory: give a directory that a log was written to",
    ),
    (NotALog(PATH, to_write=True), {"path": PATH, "to_write": True}, "give an empty or new directory"),
    (
        LogUnavailable(PATH, "Read-only file system"),
        {"path": PATH, "reason": "Read-only file system"},
        "may write to",
    ),
    (LogOfOtherKind(PATH, "feed"), {"path": PATH, "kind": "feed"}, "records what engines published"),
    (LogOfOtherKind(PATH, "cache"), {"path": PATH, "kind": "cache"}, "the log of a cache"),
    (ZstdMissing(PATH), {"path": PATH}, "pip install 'kvcache[zstd]'"),
    (LogOutdated(PATH), {"path": PATH}, "kvcache log compress"),
    (LogTooNew(PATH, 9), {"path": PATH, "version": 9}, "upgrade"),
    (
        LogDamaged(PATH, 64, 3, "torn apart"),
        {"path": PATH, "offset": 64, "seq": 3, "reason": "torn apart"},
        "byte 64, batch 3: torn apart",
    ),
    (LogDamaged(PATH, 0, None, "no header"), {"offset": 0, "seq": None}, "byte 0: no header"),
    (
        LogWriteFailed(PATH, "disk full", 28),
        {"path": PATH, "reason": "disk full", "errno": 28},
        "disk full; free some space",
    ),
    (LogWriteFailed(PATH, "the log is closed"), {"path": PATH, "errno": None}, "closed; open a new log"),
]


@pytest.mark.parametrize(("error", "fields", "words"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_errors_say_what_happened_and_keep_it_over_pickling(
    error: EventsError, fields: dict[str, object], words: str
) -> None:
    """A program finds the facts in fields, a person in the message, also in another process."""
    named = type(error)(**vars(error))
    for copy in (error, pickle.loads(pickle.dumps(error)), pickle.loads(pickle.dumps(named))):
        assert type(copy) is type(error)
        assert {name: getattr(copy, name) for name in fields} == fields
        assert words in str(copy)


def test_every_error_is_in_the_drawn_tree_and_has_an_example() -> None:
    """The tree in the module's docstring names all errors, and this file builds each of them."""
    names = {name for name, value in vars(events.errors).items() if isinstance(value, type)} - {
        "Path",
        "FieldsError",
    }
    assert names - {"EventsError", "LogError"} == {type(error).__name__ for error, _, _ in EXAMPLES}
    assert all(name in str(events.errors.__doc__) for name in names)
    assert all(isinstance(error, LogError | UnsafeFile) for error, fields, _ in EXAMPLES if "path" in fields)
