"""The bytes of a segment, as they were written, whether its file holds them so or compressed."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from events.errors import LogDamaged, LogTooNew
from events.log import groups
from events.log.groups import GROUP_HEADER_BYTES, GroupHeader, parse_group_header
from events.log.zstd import require_zstd

COMPRESSED_SUFFIX = ".kvlogz"
NOT_INTACT = "a group of compressed frames is not intact"
_CHUNK_BYTES = 1 << 20
_LOOK_BYTES = 1 << 16
"""What is taken at a time where the next group is looked for."""


class StoredBytes:
    """The bytes of a segment's file, open for reading. Opening raises LogDamaged if it is no file, and OSError."""

    is_compressed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        # SECURITY: a link in the directory could make us read, and later cut, some other file; a pipe could make
        # us wait for ever.
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if not path.is_symlink():
                raise
            # The system's own words tell nobody what to do.
            advice = (
                f"{path.name} is a symbolic link, which is not followed: put the file itself in its place"
            )
            raise OSError(error.errno, advice, str(path)) from None
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise LogDamaged(path, 0, None, "it is not a regular file")

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def size(self) -> int:
        """Bytes in the segment now."""
        return os.fstat(self.descriptor).st_size

    def read(self, offset: int, least: int, most: int) -> bytes | memoryview:
        """The bytes from `offset` on: at least so many, unless the segment ends before."""
        return self._pread(max(least, most), offset)

    def end(self, offset: int) -> int:
        """Where a frame that begins there must have ended."""
        return self.size()

    def is_lost(self, offset: int) -> bool:
        """Whether what should be there cannot be expanded."""
        return False

    def _pread(self, count: int, offset: int) -> bytes:
        """`os.pread` that comes back short only at the end of the file (the system stops at 2 GiB); names the file."""
        try:
            data = os.pread(self.descriptor, count, offset)
            while len(data) < count:
                more = os.pread(self.descriptor, count - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        return data


class _Group(NamedTuple):
    header: GroupHeader
    position: int
    """In the file, of what is behind the header."""


class CompressedBytes(StoredBytes):
    """Those of a compressed segment. What cannot be expanded is read as zeros, which are no frame.

    Opening also raises LogDamaged if there is nothing that could be, and LogTooNew; reading, ZstdMissing.
    """

    is_compressed = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._groups = list(self._found())
            if not self._groups:
                raise LogDamaged(path, 0, None, "nothing of the compressed segment is intact")
        except BaseException:
            self.close()
            raise
        self._begins = [each.header.begin for each in self._groups]
        self._expanded: tuple[int, memoryview | None] = (-1, None)

    def size(self) -> int:
        """Bytes in the segment, as each of its groups tells."""
        return self._groups[0].header.whole

    def read(self, offset: int, least: int, most: int) -> bytes | memoryview:
        """The bytes from `offset` on: at least so many, unless the segment ends before."""
        end = min(offset + least, self.size())
        part = self._part(offset)
        if offset + len(part) >= end:
            return part
        parts = [part]
        while (offset := offset + len(parts[-1])) < end:
            parts.append(self._part(offset))
        return b"".join(parts)

    def end(self, offset: int) -> int:
        """Where a frame that begins there must have ended: none is in two groups."""
        return self._around(offset)[1]

    def is_lost(self, offset: int) -> bool:
        """Whether what should be there cannot be expanded."""
        begin, end, at = self._around(offset)
        return begin <= offset < end and (at is None or self._expand(at) is None)

    def _part(self, offset: int) -> memoryview:
        """The bytes from there to the end of their group."""
        begin, end, at = self._around(offset)
        if offset >= end:
            return memoryview(b"")
        data = None if at is None else self._expand(at)
        # Of a long hole no more than is taken at a time elsewhere.
        return (
            data[offset - begin :] if data is not None else memoryview(bytes(min(end - offset, _CHUNK_BYTES)))
        )

    def _around(self, offset: int) -> tuple[int, int, int | None]:
        """Where the group around this place begins and ends, and its index; or the hole, which has none."""
        at = bisect_right(self._begins, offset) - 1
        before = self._groups[at].header if at >= 0 else None
        end = 0 if before is None else before.begin + before.size
        if before is not None and offset < end:
            return before.begin, end, at
        behind = self._begins[at + 1] if at + 1 < len(self._begins) else self.size()
        return end, behind, None

    def _expand(self, at: int) -> memoryview | None:
        """The bytes of a group; None: they are lost."""
        if self._expanded[0] != at:
            header, position = self._groups[at]
            if header.method != groups.PLAIN:
                require_zstd(self.path)
            try:
                data = memoryview(groups.expand(header, self._pread(header.stored, position)))
            except ValueError:
                data = None
            self._expanded = at, data
        return self._expanded[1]

    def _found(self) -> Iterator[_Group]:
        """The groups whose headers are intact, in the order of what they hold."""
        position, reached, whole = 0, 0, None
        disk = os.fstat(self.descriptor).st_size
        while position < disk:
            header = parse_group_header(self._pread(GROUP_HEADER_BYTES, position))
            if header is None:
                position = self._next_group(position + 1, disk)
                continue
            if header.version > groups.VERSION:
                raise LogTooNew(self.path, header.version)
            whole = header.whole if whole is None else whole
            position += GROUP_HEADER_BYTES
            end = header.begin + header.size
            if header.whole == whole and reached <= header.begin < end <= whole:
                reached = end
                yield _Group(header, position)
            # Where that is damaged, too, the next header is looked for right behind this one.
            behind = position + header.stored
            position = (
                behind if behind == disk or self._is_group(behind) else self._next_group(position, disk)
            )

    def _is_group(self, position: int) -> bool:
        return parse_group_header(self._pread(GROUP_HEADER_BYTES, position)) is not None

    def _next_group(self, position: int, disk: int) -> int:
        """Where the next intact header begins, from there on."""
        while position < disk:
            chunk = self._pread(_LOOK_BYTES, position)
            at = chunk.find(groups.SYNC)
            while at >= 0:
                if self._is_group(position + at):
                    return position + at
                at = chunk.find(groups.SYNC, at + 1)
            position += max(len(chunk) - len(groups.SYNC) + 1, 1)
        return disk


def open_stored(path: Path) -> StoredBytes:
    """Open a segment, by its name; one that was compressed since its name was read, compressed.

    Raises LogDamaged, LogTooNew, OSError, of which FileNotFoundError means that it is gone in either form.
    """
    if path.suffix == COMPRESSED_SUFFIX:
        return CompressedBytes(path)
    try:
        return StoredBytes(path)
    except FileNotFoundError as gone:
        try:
            return CompressedBytes(path.with_suffix(COMPRESSED_SUFFIX))
        except FileNotFoundError:
            raise gone from None


def stored_size(path: Path) -> int:
    """Bytes of a segment, as it was written. Raises OSError."""
    if path.suffix == COMPRESSED_SUFFIX:
        with path.open("rb") as file:
            header = parse_group_header(file.read(GROUP_HEADER_BYTES))
        if header is not None:
            return header.whole
    return path.stat().st_size
