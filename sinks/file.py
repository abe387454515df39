"""``file:///path/events.jsonl`` keeps events as JSON lines, one object per batch, for `jq` and the like.

A batch is one line because it is the unit of atomicity: a reader sees all of it or none. Each is written
with one system call and no buffer, so ``tail -f`` is up to date and a killed process loses only what was
queued. A line that the disk takes only in part is cut off again. ``?format=trtllm`` makes other lines (`sinks.trtllm`).

With ``?format=msgpack`` a batch is a frame: the file begins with ``kvevent`` and a version byte, 1; a frame is the
number of its bytes (4, big-endian) and a msgpack array ``[seq, ts, [event, ...]]``, an event ``[type, field, ...]``.

Token ids are the prompt: they are left out unless ``?tokens=1``. A new file is readable by its owner only. One that is
there is refused if another user has made it or may write it, or may read it where it is to hold tokens
(`events.files.safe.open_output`). A file that is not empty is refused unless ``?append=1``: a kept one must not be
mixed up with another run's by accident. One writer per file, which a lock on it enforces.

With ``?max_bytes=64MiB`` a file that the next line would take beyond that size becomes ``events.jsonl.1``, and a new
one is begun; ``&keep=5`` such older files are kept, at most 1000, ``.1`` the newest. If another program rotates the
file, as logrotate does, the sink notices within a second; `FileSink.reopen` does it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from events.codec import batch_without_tokens, encode_batch, to_json
from events.files.safe import OTHERS, OTHERS_WRITE, create_file, open_output
from events.log.durable import write_all
from events.log.reader import stamp_of
from events.types import EventBatch
from sinks.base import SinkContext, SinkError, SinkURL
from sinks.trtllm import DictFeed, LineOutput, dict_feed

HEADER = b"kvevent\x01"
_LENGTH_BYTES = 4
_TAIL_BYTES = 1 << 16


class JSONLines:
    """A JSON object per line. A line that a killed writer left in the middle stays a line of its own."""

    header = b""
    """Header of each file."""

    def __init__(self, key_bytes: int, *, tokens: bool) -> None:
        self._key_bytes, self._tokens = key_bytes, tokens

    def encode(self, batch: EventBatch) -> bytes:
        """Encode a batch as one line."""
        return to_json(batch, self._key_bytes, tokens=self._tokens) + b"\n"

    def end(self, path: Path, file: BinaryIO) -> tuple[int, bytes]:
        """Return the offset at which a file that is not empty continues, its end, and the bytes to write first."""
        size = file.seek(-1, os.SEEK_END) + 1
        return size, b"" if file.read(1) == b"\n" else b"\n"

    def last_seq(self, file: BinaryIO) -> int | None:
        """Return the number of the last whole batch in the file; None: there is none."""
        tail, at = b"", file.seek(0, os.SEEK_END)
        while at and tail.count(b"\n") < 2:  # the end of the line before it, and its own
            step = min(at, max(_TAIL_BYTES, len(tail)))
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
        try:
            line = tail.rpartition(b"\n")[0].rpartition(b"\n")[2]
            return msgspec.json.decode(line, type=_Numbered).seq
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class Frames:
    """A frame per batch. One that a killed writer left in the middle is cut off by the next."""

    header = HEADER
    """Header of each file."""

    def __init__(self, *, tokens: bool) -> None:
        self._tokens = tokens

    def encode(self, batch: EventBatch) -> bytes:
        """Encode a batch as one frame."""
        payload = encode_batch(batch if self._tokens else batch_without_tokens(batch))
        return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload

    def end(self, path: Path, file: BinaryIO) -> tuple[int, bytes]:
        """Return the end of the last whole frame. Raises SinkError if the file holds other data."""
        begin = file.read(len(HEADER))
        if not HEADER.startswith(begin):
            raise SinkError(f"{path} does not consist of msgpack frames: remove it, or choose another path")
        return (_last_frame(file)[1] if begin == HEADER else 0), b""

    def last_seq(self, file: BinaryIO) -> int | None:
        """Return the number of the last whole batch in the file; None: there is none."""
        if file.read(len(HEADER)) != HEADER:
            return None
        start, end = _last_frame(file)
        file.seek(start)
        try:
            return stamp_of(file.read(end - start)).seq
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


class _Numbered(msgspec.Struct, frozen=True):
    """The number in a line."""

    seq: int


def _last_frame(file: BinaryIO) -> tuple[int, int]:
    """Return the start and the end of the last whole frame's payload."""
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


LOOK_SECONDS = 1.0
"""Interval at which the sink checks that its path is still its file."""
KEEP = 5
MOST_KEPT = 1000
"""Each rotation renames all of them."""


class FileOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    format: Literal["jsonl", "msgpack", "trtllm"] = "jsonl"
    tokens: bool = False
    append: bool = False
    max_bytes: str = "0"
    keep: int = KEEP


class FileSink(LineOutput):
    """Appends batches to a file; one that would grow beyond `max_bytes` (0: any size) is rotated."""

    def __init__(self, path: str | Path, options: FileOptions, key_bytes: int, max_bytes: int = 0) -> None:
        # Always the same file, even if the process changes its directory.
        self._path = Path(path).absolute()
        self.needs_tokens = tokens = options.tokens
        self._holds_prompts = tokens or options.format == "trtllm"
        packed = options.format == "msgpack"
        self._encoding = Frames(tokens=tokens) if packed else JSONLines(key_bytes, tokens=tokens)
        self._append = options.append
        self._max_bytes, self._keep = max_bytes, options.keep
        self._fd = -1
        self._regular = False
        """True if it is a regular file, which can be moved and cut; False for a pipe or a device."""
        self._begun = False
        """True if a pipe or a device has its header."""
        self._looked_at = 0.0

    def open(self) -> None:
        """Create the file, or open it for appending.

        Raises SinkError if there is no such directory or two runs would be mixed, UnsafeFile, OSError.
        """
        self._take(self._opened())
        # The file from now on is this sink's own, also after a failure.
        self._append = True

    def resume(self, last_seq: int) -> int:
        """Continue in a file filled by an earlier process, up to batch `last_seq` or further; return the last batch."""
        self._append = True
        with contextlib.suppress(FileNotFoundError):
            # Not for a pipe: its earlier data cannot be read.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                return last_seq
            with os.fdopen(descriptor, "rb") as file:
                # A later batch may have been written since the number was saved.
                return max(last_seq, self._encoding.last_seq(file) or last_seq)
        return last_seq

    def write(self, batch: EventBatch) -> None:
        """Append one batch. Raises as `append` does."""
        self.append(self._encoding.encode(batch))

    def append(self, data: bytes) -> None:
        """Append whole lines, or frames. Raises OSError after cutting off a part that was written."""
        self.tick()
        if self._is_full(len(data)) and not self._is_in_place():
            # The current file may be another program's, and is not ours to move.
            self.reopen()
        if self._is_full(len(data)):
            rotated = _rotate(self._path, self._keep)
            self._lock(rotated)
            self._take(rotated)
        size = os.fstat(self._fd).st_size
        is_begun = bool(size) if self._regular else self._begun
        try:
            write_all(self._fd, [data] if is_begun else [self._encoding.header + data])
            self._begun = True
        except OSError:
            # Only a file can be cut; a pipe's reader has received the piece already.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise

    def tick(self) -> None:
        """Check, at intervals, if the path is another file by now, or none. Raises as `open` does."""
        now = time.monotonic()
        if self._regular and now - self._looked_at >= LOOK_SECONDS:
            if not self._is_in_place():
                self.reopen()
            self._looked_at = now

    def reopen(self) -> None:
        """Continue in the current file of the path, or in a new one. Raises as `open` does."""
        if not (self._regular and self._is_in_place()):
            self._take(self._opened())

    def close(self) -> None:
        """Close the file."""
        descriptor, self._fd = self._fd, -1
        _release(descriptor)

    def _is_full(self, more: int) -> bool:
        size = os.fstat(self._fd).st_size if self._max_bytes else 0
        return bool(size) and size + more > self._max_bytes

    def _opened(self) -> int:
        try:
            fd = open_output(self._path, OTHERS if self._holds_prompts else OTHERS_WRITE)
        except FileNotFoundError:
            raise SinkError(f"directory {self._path.parent} does not exist") from None
        try:
            self._prepare(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _take(self, fd: int) -> None:
        """Use this descriptor for writing from now on."""
        before, self._fd = self._fd, fd
        if before >= 0:
            _release(before)
        self._regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._looked_at = time.monotonic()

    def _prepare(self, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            if self._max_bytes:
                raise SinkError(f"{self._path} is not a regular file and cannot be rotated: omit max_bytes=")
            return
        self._lock(fd)
        self._refuse_existing(status.st_size)
        if status.st_size:
            # A writer may have been killed in the middle of a line or frame.
            with self._path.open("rb") as file:
                end, first = self._encoding.end(self._path, file)
            if end < status.st_size:
                os.ftruncate(fd, end)
            if first:
                write_all(fd, [first])

    def _lock(self, fd: int) -> None:
        """Lock the file against other writers, under whatever name. Not every file system can do that."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another sink writes to this file, possibly under another name: give each its own file"
            raise SinkError(f"{self._path}: {reason}") from None
        except OSError:
            return

    def _refuse_existing(self, size: int) -> None:
        instead = "remove it, choose another path, or add ?append=1"
        if size and not self._append:
            raise SinkError(f"{self._path} is not empty: {instead}")
        for number in range(1, self._keep + 1 if self._max_bytes else 1):
            older = _older_file(self._path, number)
            if not self._append and os.path.lexists(older):
                raise SinkError(f"{older} would be mistaken for a rotated file of this run: {instead}")
            if older.is_dir():
                reason = "is a directory in the place of a rotated file: move it, or choose another path"
                raise SinkError(f"{older} {reason}")

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False


def create(url: SinkURL, context: SinkContext) -> FileSink | DictFeed:
    """Create the sink for a ``file:`` URL. ``file:relative/path`` is relative to the working directory."""
    options = url.read_options(FileOptions)
    if url.host not in (None, "localhost") or url.port is not None:
        raise url.error(
            "write file:///tmp/events.jsonl for an absolute path and file:events.jsonl for a relative one"
        )
    if not url.path or url.path.endswith("/"):
        raise url.error("a file name is required, as in file:///tmp/events.jsonl")
    max_bytes = int(url.quantity(options, "max_bytes"))
    if not 0 <= options.keep <= MOST_KEPT:
        raise url.error(f"bad option: keep must be from 0 to {MOST_KEPT}")
    if "keep" in url.options and not max_bytes:
        raise url.error("keep= requires max_bytes=")
    sink = FileSink(url.file_path(url.path), options, context.key_bytes, max_bytes)
    return dict_feed(url, sink, context, max_bytes) if options.format == "trtllm" else sink


def _release(descriptor: int) -> None:
    """Unlock and close a file: closing alone would keep the lock in a forked process that shares it."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _older_file(path: Path, number: int) -> Path:
    """Return the path of an older file; 1 is the newest."""
    return path.with_name(f"{path.name}.{number}")


def _rotate(path: Path, keep: int) -> int:
    """Make `path` the newest of `keep` older files, and return the descriptor of a new file there, for appending.

    Raises OSError. The step likely to fail, making a file, comes first, and changes nothing if it fails.
    """
    unfinished = path.with_name(f"{path.name}.new")
    descriptor = create_file(unfinished, os.O_WRONLY | os.O_APPEND)
    try:
        for number in range(keep - 1, 0, -1):
            _move(_older_file(path, number), _older_file(path, number + 1))
        if keep:
            _move(path, _older_file(path, 1))
        unfinished.replace(path)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return descriptor


def _move(source: Path, target: Path) -> None:
    # The user may have removed it, rightfully.
    with contextlib.suppress(FileNotFoundError):
        source.replace(target)
