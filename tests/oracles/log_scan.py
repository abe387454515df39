"""What can be read of a log, and where it is damaged, by `tests.oracles.log_files` and docs/reference/log.md.

A reader of the log (`events.log.reader`) stops at the first damaged place. This one says where that is, too, and goes
on behind it, with the next whole frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from zlib import crc32

import msgspec

from events.errors import LogDamaged, LogTooNew
from events.packed import NAME_BYTES, are_keys, broken_column
from events.types import FORMAT_VERSION, CacheCreated, EventBatch
from tests.oracles import log_files as raw
from tests.oracles.log_files import RawSnapshot, usable_snapshots

_NOT_EXPANDED = "the content of a compressed frame is not intact"
_SHORT = "the segment header is cut short"
_TIMES_LOOKED_AT = 16
"""Behind damage, payloads are looked at that together have so many times the bytes of their segment, and no more."""


@dataclass(frozen=True)
class Damage:
    """A place where what was written is not there any more."""

    path: Path
    offset: int
    seq: int
    """Of the batch that was expected there."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is damaged at byte {self.offset}, batch {self.seq}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A whole frame."""

    path: Path
    offset: int
    header: raw.Header
    frame: raw.Frame
    batch: EventBatch | None
    """None: it is the mark of an orderly end."""


@dataclass(frozen=True)
class State:
    """A snapshot that stands for segments which are not kept any longer."""

    snapshot: RawSnapshot


class _Wrong(NamedTuple):
    """A place where the next frame does not stand."""

    offset: int
    reason: str
    what: Literal["broken", "misplaced", "nonsense"] = "broken"
    """Not whole; another one, which is; whole, and holds no batch."""


class Scan:
    """Iterates, once, over a log in the order of its files' names, or in the `order` given.

    Given an order, names are not looked at: files may have been renamed. Raises LogTooNew, OSError.
    """

    def __init__(self, directory: Path, order: Sequence[Path] | None = None) -> None:
        self._directory, self._order = directory, order
        self.kind: Literal["clean", "open", "torn"] = "open"
        """How the log ends, once all of it was read."""
        self.path, self.offset = directory, 0
        """Where that is."""
        self.seq = 0
        """Of the next batch."""
        self._number = self._epoch = 0
        self._log_id: bytes | None = None
        self._crc: int | None = 0
        """Of the payload before; None: it is not known, because of damage."""
        self._closed = False
        self._ended = False
        """A writer may begin another segment behind the last one; it is not for us."""
        self._key_bytes = NAME_BYTES
        self._block, self._after_frame = memoryview(b""), 0
        """Frames that were expanded and not read yet; where the file goes on behind the frame that was read last."""
        self._patience = 0
        """Bytes of payloads that are looked at behind damage of this segment."""

    def __iter__(self) -> Iterator[Found | Damage | State]:
        previous: Path | None = None
        while not self._ended and (path := self._after(previous)) is not None:
            number = self._number
            try:
                with raw.File(path) as file:
                    state = self._instead(file)
                    if state is None and self._is_refused(file) and self._has_moved(previous, path):
                        continue
                    previous = path
                    if state is not None:
                        self._begin_after(state)
                        previous = self._directory / f"{state.seq:020d}.kvlog"
                        yield State(state)
                    else:
                        yield from self._segment(file)
            except FileNotFoundError:
                previous = path  # It is not kept any longer.
            except LogDamaged as error:
                previous = path
                yield Damage(path, 0, self.seq, error.reason)
            except OSError as error:
                if error.errno not in raw.UNREADABLE:
                    raise
                previous = path
                yield self._unreadable(path, error, known=self._number > number)

    def _has_moved(self, previous: Path | None, path: Path) -> bool:
        """Whether it is not what stands behind the previous one any more: the log's keeper was at work meanwhile."""
        return not raw.is_there(path) if self._order is not None else self._after(previous) != path

    def _is_refused(self, file: raw.File) -> bool:
        header = file.header(raw.SEGMENT_MAGIC)
        return header is not None and self._why_not(file, header) is not None

    def _unreadable(self, path: Path, error: OSError, *, known: bool) -> Damage:
        """A segment that the disk does not give back, whose number is `known` or not; the next one is gone on with."""
        self._number += not known
        self._crc, self._closed = None, False
        offset = self.offset if self.path == path else 0
        return Damage(path, offset, self.seq, f"it cannot be read: {error.strerror}")

    def _after(self, previous: Path | None) -> Path | None:
        paths = raw.segments(self._directory) if self._order is None else self._order
        if previous in paths and self._order is not None:
            paths = paths[paths.index(previous) + 1 :]
        elif previous is not None:
            paths = [path for path in paths if int(path.stem) > int(previous.stem)]
        return paths[0] if paths else None

    def _instead(self, file: raw.File) -> RawSnapshot | None:
        """What stands for segments that were removed; nothing stands for those that are missing between others."""
        header = file.header(raw.SEGMENT_MAGIC)
        if header is None or header.number <= self._number or not self._is_named(file, header):
            return None
        if any(raw.is_there(path) for path in self._before(file.path)):
            return None
        later = (each for each in usable_snapshots(self._directory) if each.header.number > self._number)
        return next(later, None)

    def _before(self, path: Path) -> list[Path]:
        if self._order is not None:
            return list(self._order[: self._order.index(path)])
        return [each for each in raw.segments(self._directory) if int(each.stem) < int(path.stem)]

    def _begin_after(self, snapshot: RawSnapshot) -> None:
        header, alongside = snapshot.header, snapshot.alongside
        self._log_id, self._epoch, self._number = header.log_id, header.epoch, header.number
        self.seq, self._crc, self._closed = alongside.next_seq, header.before, alongside.closed
        self.kind = "clean" if alongside.closed else "open"
        self._broken_columns(snapshot.batch)

    def _is_named(self, file: raw.File, header: raw.Header) -> bool:
        return self._order is not None or int(file.path.stem) == header.first

    def _segment(self, file: raw.File) -> Iterator[Found | Damage]:
        header = file.header(raw.SEGMENT_MAGIC)
        if header is None:
            if self._after(file.path) is None and file.size() < raw.HEADER_BYTES:
                self.kind, self.path, self.offset, self._ended = "torn", file.path, 0, True
                return
            short = file.size() < raw.HEADER_BYTES
            yield Damage(file.path, 0, self.seq, _SHORT if short else "the segment header is not intact")
            header = self._guess(file)
        else:
            reason = self._why_not(file, header)
            if reason is not None:
                yield Damage(file.path, 0, self.seq, reason)
                if self._is_elsewhere(file, header):
                    return
                self._crc = None
        if header is None:
            self._number, self._crc = self._number + 1, None
            return
        self._log_id, self._epoch, self._number = header.log_id, header.epoch, header.number + 1
        self._closed = False
        if self._crc is None:
            self._crc, self.seq = header.before, max(self.seq, header.first)
        yield from self._frames(file, header)

    def _why_not(self, file: raw.File, header: raw.Header) -> str | None:
        """Why this cannot be the next segment."""
        if header.epoch > raw.MAX_EPOCH:
            return "its epoch number is out of range"
        if header.window > raw.MAX_WINDOW:
            return "it refers back too far"
        if not self._is_named(file, header):
            return "the file name does not match the segment"
        if header.number != self._number:
            return f"segment {self._number} is missing"
        if self._log_id not in (None, header.log_id):
            return "the segment belongs to another log"
        if header.epoch < self._epoch or (self._closed and header.epoch == self._epoch):
            return "the segment belongs to an epoch that has ended"
        if self._crc not in (None, header.before) or header.first < self.seq:
            return "frames are missing before this segment"
        return None

    def _is_elsewhere(self, file: raw.File, header: raw.Header) -> bool:
        """Whether what is in a segment belongs into another place, or has been read."""
        if header.epoch > raw.MAX_EPOCH or header.window > raw.MAX_WINDOW or not self._is_named(file, header):
            return True
        foreign = self._log_id not in (None, header.log_id)
        return foreign or header.number < self._number or header.epoch < self._epoch

    def _guess(self, file: raw.File) -> raw.Header | None:
        """What a segment whose header is damaged most likely is: the next one of this epoch, or of the next."""
        log_id = self._log_id or next(self._log_ids(), None)
        for epoch in (self._epoch, self._epoch + 1) if log_id is not None else ():
            assert log_id is not None
            header = raw.Header(log_id, epoch, self._number, self.seq, self._crc or 0, raw.MAX_WINDOW)
            if file.frame(raw.HEADER_BYTES, header.seed) is not None:
                return header
        return None

    def _log_ids(self) -> Iterator[bytes]:
        for path in raw.segments(self._directory):
            with suppress(LogDamaged, OSError), raw.File(path) as file:
                header = file.header(raw.SEGMENT_MAGIC)
                if header is not None:
                    yield header.log_id

    def _frames(self, file: raw.File, header: raw.Header) -> Iterator[Found | Damage]:
        offset: int | None = raw.HEADER_BYTES
        self._patience, self._block = _TIMES_LOOKED_AT * file.size(), memoryview(b"")
        while offset is not None:
            found = self._frame(file, header, offset)
            if isinstance(found, _Wrong) and file.renewed():
                found = self._frame(file, header, offset)
            self.path, self.offset = file.path, offset
            if isinstance(found, _Wrong):
                if self._is_end(file, header, found):
                    return
                found = self._frame(file, header, offset)  # A writer may have gone on since.
            if isinstance(found, Found):
                frame = found.frame
                self.seq, self._crc = frame.seq + (not frame.ends_epoch), frame.crc
                self._closed = frame.ends_epoch
                yield found
                offset = offset if self._block else self._after_frame
            else:
                self._block = memoryview(b"")
                yield Damage(file.path, offset, self.seq, found.reason)
                offset = self._go_on(file, header, found)

    def _frame(self, file: raw.File, header: raw.Header, offset: int) -> Found | _Wrong:
        """The frame there, or the next one in the compressed frame there, if it is the next one."""
        if self._block:
            return self._in_block(file, header, offset)
        frame = file.frame(offset, header.seed)
        if frame is None:
            short = file.size() - offset < raw.FRAME_HEADER_BYTES
            return _Wrong(offset, "a frame header is cut short" if short else "a frame header is not intact")
        refusal = self._refusal(frame)
        if refusal is not None:
            return _Wrong(offset, refusal, "misplaced")
        payload = file.payload(offset, frame)
        if payload is None:
            return _Wrong(offset, "a frame's payload is cut short or not intact")
        self._after_frame = offset + raw.FRAME_HEADER_BYTES + frame.bytes
        if frame.flags & raw.COMPRESSED:
            self._block = memoryview(file.expanded(header, frame, payload) or b"")
            return self._in_block(file, header, offset)
        return self._found(file, header, offset, frame, payload)

    def _in_block(self, file: raw.File, header: raw.Header, offset: int) -> Found | _Wrong:
        """The next frame of what was expanded. What is wrong there was written so."""
        frame = raw.parse_frame(self._block, header.seed)
        if frame is None or frame.flags & (raw.COMPRESSED | raw.ENDS_EPOCH):
            return _Wrong(offset, _NOT_EXPANDED, "nonsense")
        end = raw.FRAME_HEADER_BYTES + frame.bytes
        payload, refusal = self._block[raw.FRAME_HEADER_BYTES : end], self._refusal(frame)
        if refusal is not None or len(payload) < frame.bytes or crc32(payload) != frame.crc:
            return _Wrong(offset, refusal or _NOT_EXPANDED, "nonsense")
        found = self._found(file, header, offset, frame, payload)
        if isinstance(found, Found):
            self._block = self._block[end:]
        return found

    def _found(
        self, file: raw.File, header: raw.Header, offset: int, frame: raw.Frame, payload: bytes | memoryview
    ) -> Found | _Wrong:
        batch = None if frame.ends_epoch else self._decode(file.path, frame, payload)
        if isinstance(batch, str):
            return _Wrong(offset, batch, "nonsense")
        return Found(file.path, offset, header, frame, batch)

    def _refusal(self, frame: raw.Frame) -> str | None:
        """Why a frame whose header is whole cannot be the next one."""
        if self._closed:
            return "a frame follows the end of its epoch"
        if self._crc not in (None, frame.before):
            return "the frame does not continue the previous one"
        if frame.seq != self.seq and not (frame.flags & raw.AFTER_LOSS and frame.seq > self.seq):
            return f"the frame is of batch {frame.seq}"
        return frame.refusal

    def _is_end(self, file: raw.File, header: raw.Header, wrong: _Wrong) -> bool:
        """Whether nothing was lost where no frame can be read."""
        is_last = self._after(file.path) is None
        # The size is looked at after that: a segment that has a successor does not grow.
        if wrong.offset >= file.size():
            self.kind, self._ended = "clean" if self._closed else "open", is_last
            return True
        later = (
            frame.seq > self.seq and frame.flags & raw.AFTER_SYNC
            for _, frame in file.frames_from(wrong.offset + 1, header.seed)
        )
        if not is_last or wrong.what != "broken" or any(later):
            return False
        self.kind, self._ended = "torn", True
        return True

    def _go_on(self, file: raw.File, header: raw.Header, wrong: _Wrong) -> int | None:
        """Where the next whole frame stands behind a damaged place; None: in another segment."""
        begin = wrong.offset + (wrong.what != "misplaced")
        self._crc, self._closed = None, False
        for offset, frame in file.frames_from(begin, header.seed):
            if frame.seq < self.seq or frame.refusal is not None:
                continue
            if frame.flags & raw.COMPRESSED and not frame.flags & raw.BEGINS_STREAM:
                continue  # It is of a stream of which something is lost.
            # Headers by the thousand, each for all of the segment, were not left by any accident.
            self._patience -= frame.bytes
            if self._patience < 0:
                break
            if file.payload(offset, frame) is not None:
                self.seq = frame.seq
                return offset
        return None

    def _decode(self, path: Path, frame: raw.Frame, payload: bytes | memoryview) -> EventBatch | str:
        """The batch, or why it is none."""
        try:
            batch = msgspec.msgpack.decode(payload, type=EventBatch)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "not an event batch"  # SECURITY: what msgspec says may quote it.
        if (batch.seq, len(batch.events)) != (frame.seq, frame.events):
            return "header and payload disagree"
        for event in batch.events:
            if type(event) is CacheCreated and event.format_version > FORMAT_VERSION:
                raise LogTooNew(path, event.format_version)
        return self._broken_columns(batch) or batch

    def _broken_columns(self, batch: EventBatch) -> str | None:
        """What no reader of the events could make sense of; None if there is nothing."""
        for event in batch.events:
            if type(event) is CacheCreated:
                if not are_keys(event.key_bytes):
                    return f"keys cannot have {event.key_bytes} bytes"
                self._key_bytes = event.key_bytes
            elif (reason := broken_column(event, self._key_bytes)) is not None:
                return reason
        return None
