"""Logs whose events say what cannot be: changed at random, in ways that the schema allows, behind valid checksums."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from events.codec import decode_batch, encode_batch
from events.errors import EventDecodeError
from events.log import frames
from events.log.frames import AFTER_LOSS, FrameHeader, SegmentHeader
from events.log.segments import segment_name
from events.types import FIRST_FORMAT, EpochStarted, EventBatch
from tests.support.logs.logs import LOG_ID

_INTEGERS = (0, 1, 2, 255, 2**15, 2**20, 2**31 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
_TEXTS = ("", "\x1b[31mX\x07", "a" * 5000, "\u202egnp", "a\nb", "=1+1", "{", '{"a":1}', "0", "\ud800")
_ENTRY_BYTES = (4, 8, 8, 32)


def mutated(rng: random.Random, batches: Sequence[EventBatch]) -> list[EventBatch]:
    """One to three changes: to a field of an event, or to which events a batch has and in which order.

    The first batch, by which all others are understood, is changed as often as four others are together.
    """
    changed = list(batches)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(changed)) if rng.random() < 0.8 else 0
        batch, events = changed[at], list(changed[at].events)
        if rng.random() < 0.02:
            ts = rng.choice((*_INTEGERS, *(-number for number in _INTEGERS if number <= 2**63)))
            changed[at] = EventBatch(batch.seq, ts, batch.events)
            continue
        if events:
            _change(rng, events, rng.choice(changed).events)
        candidate = EventBatch(batch.seq, batch.ts, tuple(events))
        if _is_of_the_schema(candidate):
            changed[at] = candidate
    return changed


def beginnings(batches: Sequence[EventBatch]) -> list[int]:
    """The batches with which epochs begin."""
    return [batch.seq for batch in batches if batch.events and isinstance(batch.events[0], EpochStarted)]


def write_frames(directory: Path, batches: Sequence[EventBatch], epochs: Sequence[int]) -> Path:
    """Write a log, whatever its batches say: a segment for each epoch, which begin with these; return the directory."""
    directory.mkdir()
    crc, seed, epoch, expected, path = 0, 0, -1, 0, directory
    for batch in batches:
        if batch.seq in epochs or epoch < 0:
            epoch += 1
            seed, path = frames.seed_of(LOG_ID, epoch), directory / segment_name(batch.seq)
            header = SegmentHeader(frames.VERSION, FIRST_FORMAT, 0, LOG_ID, epoch, epoch, batch.seq, crc)
            path.write_bytes(header.pack())
            expected = batch.seq
        payload = encode_batch(batch)
        flags = AFTER_LOSS if batch.seq != expected else 0
        frame = FrameHeader(len(payload), batch.seq, len(batch.events), flags, crc, crc32(payload))
        with path.open("ab") as file:
            file.write(frames.pack_frame_header(frame, seed) + payload)
        crc, expected = frame.payload_crc, batch.seq + 1
    return directory


def _is_of_the_schema(batch: EventBatch) -> bool:
    """Whether it could stand in a log: what a reader cannot decode it calls damage."""
    try:
        return decode_batch(encode_batch(batch)) == batch
    except (EventDecodeError, msgspec.MsgspecError, OverflowError, UnicodeError):
        return False


def _change(rng: random.Random, events: list[Any], others: Sequence[Any]) -> None:
    at, kind = rng.randrange(len(events)), rng.randrange(12)
    if kind < 8:
        events[at] = _struct(rng, events[at])
    elif kind == 8:
        del events[at]
    elif kind == 9:
        events.insert(at, rng.choice(events))
    elif kind == 10:
        rng.shuffle(events)
    elif others:
        events.insert(at, rng.choice(others))


def _struct(rng: random.Random, struct: Any) -> Any:
    names = struct.__struct_fields__
    if not names:
        return struct
    name = rng.choice(names)
    return msgspec.structs.replace(struct, **{name: _value(rng, getattr(struct, name))})


def _value(rng: random.Random, value: Any) -> Any:
    match value:
        case bool():
            return not value
        case enum.Enum():
            return rng.choice(list(type(value)))
        case int():
            return rng.choice((value + 1, value - 1, -value, *_INTEGERS))
        case str():
            return rng.choice(_TEXTS)
        case bytes():
            return _column(rng, value)
        case tuple():
            return _row(rng, value)
        case msgspec.Struct():
            return _struct(rng, value)
        case None:
            return rng.choice((0, 1, 2**40, "x", b"\1" * 8, -1))
        case _:
            return value


def _column(rng: random.Random, column: bytes) -> bytes:
    size = rng.choice(_ENTRY_BYTES)
    at = rng.randrange(max(len(column) // size, 1)) * size
    entry = rng.choice((b"\xff" * size, bytes(size), b"\xff" * (size - 1) + b"\x7f", rng.randbytes(size)))
    return rng.choice(
        (
            b"",
            entry,
            column[:-size],
            column[size:],
            column + column[-size:],
            column * 2,
            column * 50,
            column[:at] + entry + column[at + size :],
            column[:at] + entry + column[at + size :],
            rng.randbytes(size * 100),
        )
    )


def _row(rng: random.Random, row: tuple[Any, ...]) -> tuple[Any, ...]:
    kind = rng.randrange(5)
    if not row or kind == 0:
        return ()
    if kind == 1:
        return row[:-1]
    if kind == 2:
        return (*row, row[-1])
    at = rng.randrange(len(row))
    return (*row[:at], _value(rng, row[at]), *row[at + 1 :])
