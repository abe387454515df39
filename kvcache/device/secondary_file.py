"""The file of the secondary level, which outlives the process.

Mapped shared and written by the copier. Its content survives `kill -9`, since the system keeps it, but perhaps not a
power failure: nothing is synced, for the checksums in the log decide what is right. The header identifies the cache;
the places of blocks are in the log only.

All room is taken at once. A file with holes on a full disk would end the process in the middle of a copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from events.errors import NotARegularFile, system_reason
from events.files.safe import OTHERS, create_file, open_own
from events.log.durable import Lock, LockHeld, sync_directory, sync_file, take_lock, write_all
from events.types import SECONDARY
from kvcache.errors import NotEnoughMemory, UsageError
from kvcache.layout import Layout

if TYPE_CHECKING:
    import torch

    from cuda_ops.host_memory import PageLocker


_BEGIN_EMPTY = "start with an empty secondary level"
_TEXTS = {
    "foreign": "is not a file of a secondary level: choose another name for secondary_path",
    "newer": (
        "has format version {detail}, which is newer than this software: upgrade it, or remove the file and "
    )
    + _BEGIN_EMPTY,
    "damaged": "is damaged: {detail}; remove it, and " + _BEGIN_EMPTY,
    "of another cache": "holds the blocks of another cache: {detail}; use the settings that it was created with, "
    "choose another secondary_path, or remove the file",
    "locked": "is in use by {detail}: stop that process, or choose another secondary_path",
    "unavailable": (
        "cannot hold the secondary level: {detail}; choose a secondary_path that this user may write to"
    ),
}
"""Error texts by `SecondaryFileError.problem`."""


@dataclass(eq=False, repr=False)
class SecondaryFileError(UsageError):
    """The file of `secondary_path` cannot be used; nothing of it was changed.

    `problem`: ``foreign``, something else is there; ``newer``, in a later format; ``damaged``; ``of another cache``;
    ``locked``, another cache has it open; ``unavailable``, the system refuses. `detail` is the format's version, the
    fault or difference, the process that has it open, or the system's reason.
    """

    path: Path
    problem: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.path} {_TEXTS[self.problem].format(detail=self.detail)}"


VERSION = 1
DATA_ALIGNMENT = 4096
"""Alignment of header and pools, in bytes: a page, which can be shared with a GPU."""
DEPENDS_ON = (
    "something else that K and V depend on (model_variant, dtype, layers, heads, windows, "
    "max_sequence_length, layout)"
)
"""Inputs of `content_id`, for people."""
_MAGIC = b"KVCACHE2"
_PREFIX = struct.Struct("<8sIII")
"""Magic, version, bytes of JSON, CRC-32 of the JSON."""


def aligned(size: int) -> int:
    """The next multiple of `DATA_ALIGNMENT`."""
    return -(-size // DATA_ALIGNMENT) * DATA_ALIGNMENT


@dataclass(frozen=True, slots=True)
class SecondaryHeader:
    """Header of the file: the cache it belongs to, and the sizes of its blocks."""

    content_id: str
    """Meaning of the bytes of a block (`Layout.content_id`)."""
    blocks: list[int]
    """Blocks per group."""
    bytes_per_block: list[list[int]]
    """Bytes of a block per group and pool."""

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Build the header for a cache of this layout."""
        groups = layout.groups
        return cls(
            layout.content_id,
            [group.num_blocks[SECONDARY] for group in groups],
            [[pool.bytes_per_block for pool in group.pools] for group in groups],
        )

    def pack(self) -> bytes:
        """Encode the header as in the file."""
        text = msgspec.json.encode(self)
        packed = _PREFIX.pack(_MAGIC, VERSION, len(text), crc32(text)) + text
        return packed.ljust(aligned(len(packed)), b"\0")

    def places(self) -> tuple[list[list[int]], int]:
        """Return the start of each pool of each group, and the end, in bytes from the start of the file."""
        offset, places = len(self.pack()), list[list[int]]()
        for blocks, pools in zip(self.blocks, self.bytes_per_block, strict=True):
            places.append([])
            for size in pools:
                places[-1].append(offset)
                offset = aligned(offset + blocks * size)
        return places, offset

    def refuse_other(self, path: Path, found: bytes, size: int) -> None:
        """Raise a `SecondaryFileError` unless a file of `size` bytes that begins with `found` is ours."""
        try:
            there = msgspec.json.decode(_text_of(path, found), type=SecondaryHeader)
        except (msgspec.DecodeError, RecursionError):
            raise SecondaryFileError(path, "damaged", "its header cannot be read") from None
        if there.content_id != self.content_id:
            raise SecondaryFileError(path, "of another cache", f"it has another model, or {DEPENDS_ON}")
        if there != self:
            what = f"it has {there.blocks} secondary blocks per window, but the settings give {self.blocks}"
            raise SecondaryFileError(path, "of another cache", what)
        if size != self.places()[1]:
            raise SecondaryFileError(
                path, "damaged", f"it has {size:,} bytes instead of {self.places()[1]:,}"
            )


def _text_of(path: Path, found: bytes) -> bytes:
    if len(found) < _PREFIX.size or not found.startswith(_MAGIC):
        raise SecondaryFileError(path, "foreign")
    _, version, length, checksum = _PREFIX.unpack_from(found)
    if version > VERSION:
        raise SecondaryFileError(path, "newer", str(version))
    text = found[_PREFIX.size : _PREFIX.size + length]
    if version != VERSION or len(text) != length or crc32(text) != checksum:
        raise SecondaryFileError(path, "damaged", "its header is not intact")
    return text


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FSTORE = struct.Struct("=Iiqqq")
"""`fstore_t` of macOS, for the three constants: flags, from where, offset, bytes wanted, bytes taken."""
_F_PREALLOCATE, _F_ALLOCATEALL, _F_PEOFPOSMODE = 42, 4, 3
_BYTES_OF_ST_BLOCKS = 512
_open_files: weakref.WeakSet[SecondaryFile] = weakref.WeakSet()


class SecondaryFile:
    """The secondary level of one cache in a file, which is created if missing, and locked as long as this lives.

    `locker` page-locks its memory for a GPU. Raises a `SecondaryFileError`, in which case the file is as it
    was, NotEnoughMemory where there is no room for it, MemoryError where it cannot be page-locked, and UsageError
    without the package xxhash.
    """

    def __init__(self, path: Path, layout: Layout, locker: PageLocker | None = None) -> None:
        from cuda_ops.host_memory import Stretch, mapped_file

        self.path = path
        self._xxh3_digest, self._xxh3 = _xxh3()
        header = SecondaryHeader.of(layout)
        places, size = header.places()
        self._pools = [
            [Stretch(at, blocks * each, each) for at, each in zip(offsets, sizes, strict=True)]
            for offsets, blocks, sizes in zip(places, header.blocks, header.bytes_per_block, strict=True)
        ]
        self._lock = _locked(path)
        try:
            descriptor = _opened(path, header, size)
            try:
                self._memory = mapped_file(
                    descriptor, size, [each for pools in self._pools for each in pools], locker
                )
            finally:
                os.close(descriptor)
        except BaseException:
            self._lock.release()
            raise
        whole = self._memory.numpy()
        self._rows: list[list[npt.NDArray[np.uint8]]] = [
            [whole[at : at + size].reshape(-1, each) for at, size, each in pools] for pools in self._pools
        ]
        self.bytes_read = 0
        """Bytes read for checksums so far."""
        self._closing = weakref.finalize(self, self._lock.release)
        _open_files.add(self)

    def memory(self, group: int, pool: int) -> torch.Tensor:
        """Return the bytes of a pool; uint8 [blocks * bytes per block]."""
        at, size, _ = self._pools[group][pool]
        return self._memory[at : at + size]

    def checksums(self, group: int, slots: npt.NDArray[np.int32]) -> bytes:
        """Compute XXH3 of 64 bits over these slots in all pools of the group; 8 bytes each, big-endian."""
        pools = self._rows[group]
        self.bytes_read += len(slots) * sum(rows.shape[1] for rows in pools)
        if len(pools) == 1:
            rows, digest = pools[0], self._xxh3_digest
            return b"".join([digest(rows[slot]) for slot in slots.tolist()])
        found = bytearray()
        for slot in slots.tolist():
            checksum = self._xxh3()
            for rows in pools:
                checksum.update(rows[slot])
            found += checksum.digest()
        return bytes(found)

    def close(self) -> None:
        """Unlock the file. Its memory stays as long as a view of it lives, and must not be written any more."""
        self._closing()

    def disown(self) -> None:
        """Drop the lock in a forked child: it is the parent's."""
        if self._closing.detach() is not None:
            self._lock.disown()


def _xxh3() -> tuple[Callable[..., bytes], Callable[[], Any]]:
    try:
        import xxhash
    except ImportError:
        raise UsageError("secondary_path needs the package xxhash: pip install 'kvcache[hash]'") from None
    return xxhash.xxh3_64_digest, xxhash.xxh3_64


def _locked(path: Path) -> Lock:
    try:
        return take_lock(path.with_name(path.name + ".lock"))
    except LockHeld as held:
        raise SecondaryFileError(path, "locked", held.holder) from None
    except NotARegularFile:
        raise SecondaryFileError(
            path, "unavailable", "something other than a file has the name of its lock file"
        ) from None
    except (OSError, ValueError) as error:
        raise SecondaryFileError(path, "unavailable", system_reason(error)) from error


def _opened(path: Path, header: SecondaryHeader, size: int) -> int:
    """Open the file for reading and writing, with all its room taken."""
    try:
        try:
            descriptor = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            return _created(path, header, size)
        try:
            status = os.fstat(descriptor)
            # At least the size of our header: a longer one is another cache's, and must be recognised.
            beginning = os.pread(descriptor, max(len(header.pack()), 1 << 20), 0)
            header.refuse_other(path, beginning, status.st_size)
            _reserve(descriptor, path, size)
            if status.st_mode & (OTHERS | stat.S_IRWXG):
                # As a copy may have become: K and V are private. Root's permissions cannot be changed by others.
                with suppress(PermissionError):
                    os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
    except (IsADirectoryError, NotARegularFile):
        raise SecondaryFileError(path, "foreign") from None
    except OSError as error:
        raise SecondaryFileError(path, "unavailable", system_reason(error)) from error
    return descriptor


def _created(path: Path, header: SecondaryHeader, size: int) -> int:
    """Create a file; it gets its name when all its room is taken and its header is on disk."""
    unfinished = path.with_name(path.name + ".new")
    descriptor = create_file(unfinished, os.O_RDWR)
    try:
        _reserve(descriptor, path, size)
        write_all(descriptor, [header.pack()])
        sync_file(descriptor)
        unfinished.rename(path)
        sync_directory(path.parent)
    except BaseException:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return descriptor


def _reserve(descriptor: int, path: Path, size: int) -> None:
    """Reserve the disk, or the memory of a tmpfs, for all of the file; existing content stays."""
    try:
        try:
            _allocate(descriptor, size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
            os.ftruncate(descriptor, size)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        disk = os.statvfs(path.parent)
        where, lower = f"space in {path.parent}", "secondary_blocks or host_cache_size"
        raise NotEnoughMemory(size, disk.f_bavail * disk.f_frsize, where, lower) from None


def _allocate(descriptor: int, size: int) -> None:
    """Allocate this number of bytes for a file, which then has that size. Raises OSError if that is impossible."""
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        allocate(descriptor, 0, size)
        return
    # macOS allocates after the file's end; elsewhere the command is unknown (EINVAL).
    missing = size - os.fstat(descriptor).st_blocks * _BYTES_OF_ST_BLOCKS
    if missing > 0:
        request = _FSTORE.pack(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, missing, 0)
        fcntl.fcntl(descriptor, _F_PREALLOCATE, request)
    os.ftruncate(descriptor, size)


def _disown_all() -> None:
    for file in list(_open_files):
        file.disown()


os.register_at_fork(after_in_child=_disown_all)
