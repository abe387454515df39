"""The JSON that commands answer with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from events.structs import LEVEL_NAMES

LOGS = ("a", "b")
"""What of two logs each has, of `diff`."""


def keys_of(value: Any, place: str = "") -> Iterator[str]:
    """The keys in JSON by their path; levels, which of two logs, and places in lists are no part of it."""
    for item in value if isinstance(value, list) else ():
        yield from keys_of(item, place)
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in (*LEVEL_NAMES, *LOGS):
            yield from keys_of(inner, place)
        else:
            yield place + key
            yield from keys_of(inner, f"{place}{key}.")


SIZES = ("--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)


def answer(done: Any) -> Any:
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)
