"""Events as lines in a terminal: those of the stdout sink, with some color."""

from __future__ import annotations

import re
from collections.abc import Iterator

from events.types import EventBatch
from kvcache.cli.output import paint
from sinks.render import render_batch

_COLORS = {
    "SequenceAdded": "bold",
    "SequenceRemoved": "bold",
    "BlocksReused": "green",
    "BlocksStored": "green",
    "BlocksCopied": "green",
    "BlocksMoved": "yellow",
    "BlocksRemoved": "red",
    "TransferFailed": "red",
    "AdmissionRefused": "red",
    "Gap": "red",
    "CacheCleared": "red",
}
_LINE = re.compile(r"( *\d+\.\d+  )(\w+)(.*)")


def event_lines(batch: EventBatch, key_bytes: int) -> Iterator[str]:
    """One line per event."""
    for line in render_batch(batch, key_bytes):
        yield colored(line)


def colored(line: str) -> str:
    """The line with its address dimmed and its type in the color of what it means."""
    found = _LINE.fullmatch(line)
    if found is None:
        return line
    address, kind, details = found.groups()
    return f"{paint(address, 'dim')}{paint(kind, _COLORS[kind]) if kind in _COLORS else kind}{details}"
