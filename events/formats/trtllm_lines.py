"""An inventory as TensorRT-LLM's dicts, a JSON object in each line.

The dicts know no "cleared": what a reader may know is remembered by name, and told as removed. They have one number
each, from 0 on; where lines were lost on the way out, numbers are missing, as they are where that engine loses some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from events.codec import json_line
from events.feed.changes import AnyChange, Cached, Cleared, Created, Uncached, Updated
from events.formats import trtllm
from events.packed import unpack_names

PIECE_BYTES = 1 << 16
Envelope = dict[str, Any]
"""What stands around the data of a window's dicts."""


class DictLines:
    """Writes the changes of an inventory (`events.feed.inventory`), in pieces of about `piece_bytes`."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._next_id = 0
        self._envelopes: list[Envelope] = []
        self._known: list[set[int]] = []
        """Per group: what readers have been told to be cached."""
        self._unsure: list[tuple[int, list[int]]] = []
        """Removed by what is not known to be out: readers may still take it for cached."""

    def pieces(self, changes: Iterable[AnyChange]) -> Iterator[bytes]:
        """Whole lines. Whoever asks for the next piece says that those before are out."""
        self._take_back()
        lines: list[bytes] = []
        size = 0
        for envelope, data in _merged(item for change in changes for item in self._data(change)):
            lines.append(json_line({"event_id": self._next_id, "data": data, **envelope}) + b"\n")
            self._next_id += 1
            size += len(lines[-1])
            if size >= self._piece_bytes:
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)
        self._unsure.clear()

    def _take_back(self) -> None:
        """What was removed the last time did not get out, where anything is left of it."""
        for group, names in self._unsure:
            if group < len(self._known):
                self._known[group].update(names)
        self._unsure.clear()

    def _data(self, change: AnyChange) -> Iterator[tuple[Envelope, trtllm.Data]]:
        if isinstance(change, Cached):
            self._known[change.group].update(unpack_names(change.names).tolist())
            yield self._envelopes[change.group], trtllm.stored(change)
        elif isinstance(change, Updated):
            for data in trtllm.updated(change):
                yield self._envelopes[change.group], data
        elif isinstance(change, Uncached):
            yield self._removed(change.group, unpack_names(change.names).tolist())
        elif isinstance(change, Created):
            # What was there before, if anything, was cleared.
            told = change.hash_algorithm, change.rank
            self._envelopes = [trtllm.envelope(group, *told) for group in change.groups]
            self._known = [set() for _ in change.groups]
            yield from zip(self._envelopes, map(trtllm.created, change.groups), strict=True)
        else:
            assert isinstance(change, Cleared)
            for group, known in enumerate(self._known):
                if known:
                    yield self._removed(group, sorted(known))

    def _removed(self, group: int, names: list[int]) -> tuple[Envelope, trtllm.Data]:
        self._known[group].difference_update(names)
        self._unsure.append((group, names))
        return self._envelopes[group], trtllm.removed([*names])


def _merged(items: Iterable[tuple[Envelope, trtllm.Data]]) -> Iterator[tuple[Envelope, trtllm.Data]]:
    """Removals of a group in a row are one, as readers expect."""
    last: tuple[Envelope, trtllm.Data] | None = None
    for envelope, data in items:
        if last is None:
            last = envelope, data
        elif envelope is last[0] and data["type"] == last[1]["type"] == "removed":
            last[1]["block_hashes"] += data["block_hashes"]
        else:
            yield last
            last = envelope, data
    if last is not None:
        yield last
