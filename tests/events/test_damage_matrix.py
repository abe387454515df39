"""Damage of each kind at every place of a short log: nothing is lost without being told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest

from events import EventBatch, LogDamaged
from events.log import LogReader
from tests.support.logs.logs import batches, form, frame_offsets, segments, write_synced
from tests.support.seeds import seeds

__all__ = ["form"]

CONTENT = batches(5)
PARTS = 5
"""Each test has one of so many parts of the places."""
Kind = Callable[[bytes], Iterator[bytes]]


def flipped(data: bytes) -> Iterator[bytes]:
    """One bit."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def zeroed(data: bytes) -> Iterator[bytes]:
    """Some bytes, as of a sector that was never written."""
    for at in range(0, len(data), 2):
        for size in (1, 37, 512):
            yield data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def cut(data: bytes) -> Iterator[bytes]:
    """The end."""
    for at in range(len(data)):
        yield data[:at]


def dropped(data: bytes) -> Iterator[bytes]:
    """Bytes in the middle, so that what follows moves."""
    for at in range(0, len(data), 2):
        yield data[:at] + data[at + 36 :]
    offsets = frame_offsets(data)
    for begin, end in pairwise(offsets):
        yield data[:begin] + data[end:]


def duplicated(data: bytes) -> Iterator[bytes]:
    """Whole frames, behind any other."""
    offsets = frame_offsets(data)
    for begin, end in pairwise(offsets):
        for at in offsets:
            yield data[:at] + data[begin:end] + data[at:]


def swapped(data: bytes) -> Iterator[bytes]:
    """Two frames."""
    offsets = frame_offsets(data)
    frames = [data[begin:end] for begin, end in pairwise(offsets)]
    for one in range(len(frames)):
        for other in range(one):
            changed = [*frames]
            changed[one], changed[other] = frames[other], frames[one]
            yield data[:64] + b"".join(changed)


@pytest.mark.parametrize("part", seeds(range(PARTS), quick=1))
@pytest.mark.parametrize("kind", [flipped, zeroed, cut, dropped, duplicated, swapped])
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_nothing_is_lost_unsaid(tmp_path: Path, kind: Kind, at: int, part: int, form: str) -> None:
    """What is read is a beginning of what was written; if it is not all, damage or an interrupted end is told."""
    size = 800 if form == "plain" else 500
    write_synced(tmp_path, CONTENT, segment_bytes=size, fsync="never")
    assert len(segments(tmp_path)) > 1
    path = segments(tmp_path)[at]
    whole, reported, lost = path.read_bytes(), dict.fromkeys(("damaged", "torn", "open", "clean"), 0), 0
    for changed in islice(kind(whole), part, None, PARTS):
        if changed == whole:
            continue
        path.write_bytes(changed)
        read, reader = list[EventBatch](), LogReader(tmp_path)
        try:
            read.extend(reader)
            how: str = reader.end.kind
        except LogDamaged:
            how = "damaged"
        reported[how] += 1
        assert read == CONTENT[: len(read)]
        lost += how == "clean" and read != CONTENT
        if at == 0 and len(changed) >= len(whole):
            assert how == "damaged"
        else:
            # What reaches up to the last frame looks like an interrupted write. Frames before it are read.
            place = next(
                (i for i, (a, b) in enumerate(zip(whole, changed, strict=False)) if a != b), len(changed)
            )
            before = sum(end <= place for end in frame_offsets(whole)[1:]) if place >= 64 else 0
            assert len(read) >= min(int(path.stem) + before, len(CONTENT))
    print(f"{kind.__name__}: {reported}, {lost} losses unsaid")
    assert not lost
