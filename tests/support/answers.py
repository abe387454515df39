"""The JSON that commands answer with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from events.structs import LEVEL_NAMES
from kvcache.audit.reasons import Reason
from tests.support.places import ROOT

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


AGES = {"count", "p10_seconds", "p50_seconds", "p90_seconds", "histogram", "up_to_seconds"}
AGAIN = AGES | {reason.label for reason in Reason} | {"35"}
"""Keys of an audit that come again and again, and are documented once; 35 is a priority."""


def assert_documented(command: str, said: Any) -> None:
    """Compare the keys in a command's JSON with those in its table in docs/reference/json.md."""
    found = {key for key in keys_of(said) if not AGAIN & {key.rpartition(".")[2]}}
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    words = re.findall("`([^`]+)`", "\n".join(line for line in section.splitlines() if line[:3] == "| `"))
    assert found - set(words) <= {
        f"partial.{word}" for word in ("block", "level", "slot", "name", "num_tokens", "landed")
    }
    firsts = re.findall(r"(?m)^\| (.*?) \|", section)
    assert {word for first in firsts for word in re.findall("`([^`]+)`", first)} <= found


SIZES = ("--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)


def answer(done: Any) -> Any:
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)
