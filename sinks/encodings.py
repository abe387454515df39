"""How a file holds batches: as lines of JSON, or as frames of msgpack.

Frames: the file begins with ``kvevent`` and a byte that says which version of this they are, 1. A frame is the number
of its bytes (4, big-endian) and a msgpack array ``[seq, ts, [event, ...]]``, an event ``[type, field, ...]``. So
whoever reads can skip, and knows a frame that is not whole: there are fewer bytes than it says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from events.codec import batch_without_tokens, encode_batch, to_json
from events.types import EventBatch
from sinks.base import SinkError

HEADER = b"kvevent\x01"
_LENGTH_BYTES = 4
_TAIL_BYTES = 1 << 16


class Encoding(Protocol):
    """What stands in the file."""

    header: bytes
    """At the beginning of each file."""

    def encode(self, batch: EventBatch) -> bytes:
        """What is appended for a batch."""

    def end(self, path: Path, file: BinaryIO) -> tuple[int, bytes]:
        """Where in a file that is not empty one may go on, and what is to be written first. Raises SinkError."""

    def last_seq(self, file: BinaryIO) -> int | None:
        """The number of the last whole batch in it; None: there is none."""


class JSONLines:
    """A JSON object per line. A line that a killed writer left in the middle stays a line of its own."""

    header = b""

    def __init__(self, key_bytes: int, *, tokens: bool) -> None:
        self._key_bytes, self._tokens = key_bytes, tokens

    def encode(self, batch: EventBatch) -> bytes:
        """One line."""
        return to_json(batch, self._key_bytes, tokens=self._tokens) + b"\n"

    def end(self, path: Path, file: BinaryIO) -> tuple[int, bytes]:
        """Its end, behind a newline."""
        size = file.seek(-1, os.SEEK_END) + 1
        return size, b"" if file.read(1) == b"\n" else b"\n"

    def last_seq(self, file: BinaryIO) -> int | None:
        """That of the last whole line."""
        tail, at = b"", file.seek(0, os.SEEK_END)
        while at and tail.count(b"\n") < 2:  # the end of the line before it, and its own
            step = min(at, max(_TAIL_BYTES, len(tail)))
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
        try:
            return _read_number(tail.rpartition(b"\n")[0].rpartition(b"\n")[2]).seq
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class Frames:
    """A frame per batch. One that a killed writer left in the middle is cut off by the next."""

    header = HEADER

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens

    def encode(self, batch: EventBatch) -> bytes:
        """One frame."""
        payload = encode_batch(batch if self._tokens else batch_without_tokens(batch))
        return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload

    def end(self, path: Path, file: BinaryIO) -> tuple[int, bytes]:
        """The end of the last whole frame. Raises SinkError if there are other things in the file."""
        begin = file.read(len(HEADER))
        if not HEADER.startswith(begin):
            raise SinkError(f"{path} holds no frames of msgpack: remove it, or choose another")
        return (_last_frame(file)[1] if begin == HEADER else 0), b""

    def last_seq(self, file: BinaryIO) -> int | None:
        """That of the last whole frame."""
        if file.read(len(HEADER)) != HEADER:
            return None
        start, end = _last_frame(file)
        file.seek(start)
        try:
            return _read_frame(file.read(end - start)).seq
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


class _Numbered(msgspec.Struct, frozen=True):
    """What is looked at of a line."""

    seq: int


class _NumberedFrame(msgspec.Struct, frozen=True, array_like=True):
    """What is looked at of a frame."""

    seq: int


_read_number = msgspec.json.Decoder(_Numbered).decode
_read_frame = msgspec.msgpack.Decoder(_NumberedFrame).decode


def _last_frame(file: BinaryIO) -> tuple[int, int]:
    """Where the payload of the last whole frame begins, and where it ends."""
    total = file.seek(0, os.SEEK_END)
    start = end = len(HEADER)
    while end + _LENGTH_BYTES <= total:
        file.seek(end)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
        if end + _LENGTH_BYTES + length > total:
            break
        start = end + _LENGTH_BYTES
        end = start + length
    return start, end
