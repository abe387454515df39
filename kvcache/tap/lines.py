"""A file to which somebody writes TensorRT-LLM's event dicts, a JSON object in each line, followed as it grows.

A file holds all that was said, so it is read from its beginning each time, and nothing has to be proven. Where another
file takes its place, or it is cut, that is read from its beginning, too: its numbers go back, unless it goes on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from events.diagnostics import get_logger
from events.errors import EventDecodeError
from events.subscribe.continuity import Report
from events.subscribe.dicts import DictFollower
from events.subscribe.endpoints import EndpointError

SCHEME = "file:"
_READ_BYTES = 1 << 20
_LONGEST_LINE = 1 << 28
"""What is longer is no line."""
_LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.02

_log = get_logger(__name__)


class LineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand behind the path."""

    format: str = "trtllm"
    block_size: int | None = None
    """Tokens of a full block: then parts of blocks are left out, of which routers know nothing."""


class LinePlace(msgspec.Struct, frozen=True):
    """A file, and how it is read."""

    path: Path
    block_size: int | None = None

    @classmethod
    def read(cls, address: str) -> Self:
        """What ``file:PATH?format=trtllm&block_size=N`` says. Raises EndpointError."""
        parts = urlsplit(address)
        pairs = dict(parse_qsl(parts.query, keep_blank_values=True))
        try:
            options = msgspec.convert(pairs, LineOptions, strict=False)
        except msgspec.ValidationError:
            raise EndpointError(address, "its options are format=trtllm and block_size=N") from None
        if options.format != "trtllm":
            raise EndpointError(address, "format is one of trtllm")
        if options.block_size is not None and options.block_size < 1:
            raise EndpointError(address, "block_size= is at least 1")
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise EndpointError(address, "write file:///tmp/events.jsonl or file:events.jsonl")
        return cls(Path(unquote(parts.path)).absolute(), options.block_size)


class LineListener:
    """Follows one file. Raises EndpointError for an address that names none."""

    def __init__(self, address: str) -> None:
        self._place = LinePlace.read(address)
        self.address = address
        self._source = f"{SCHEME}{self._place.path}"
        self._follower = DictFollower(self._place.block_size)
        self._file: BinaryIO | None = None
        self._rest = b""
        self._looked_at = 0.0

    ignored = 0
    """All that stands in the file is heard."""

    def poll(self, timeout_ms: int = 50) -> list[tuple[str, Report]]:
        """What was written, after at most so long."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not (lines := self._lines()) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _PAUSE_SECONDS))
        return [(self._source, report) for line in lines for report in self._reports(line)]

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            self._file.close()

    def _reports(self, line: bytes) -> list[Report]:
        try:
            return self._follower.take(line) if line.strip() else []
        except EventDecodeError as error:
            # If it was one of the events, its number will be missing.
            _log.warning("line_not_understood", source=self._source, reason=str(error))
            return []

    def _lines(self) -> list[bytes]:
        """Whole lines that are new."""
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self._place.path.open("rb")
        data = b"" if self._file is None else self._file.read(_READ_BYTES)
        if not data:
            self._look()
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise EndpointError(self.address, "it has no lines: is it another file?")
        return lines

    def _look(self) -> None:
        """At its end: whether another file has taken its place, or it was cut."""
        now = time.monotonic()
        if self._file is None or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        opened = os.fstat(self._file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(self._place.path.stat(), opened) and self._file.tell() <= opened.st_size:
                return
            self._file.close()
            self._file, self._rest = None, b""
