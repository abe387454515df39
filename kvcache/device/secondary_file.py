"""The file in which the secondary level lies, so that its bytes outlive the process.

Mapped shared and written by whoever copies. What was written is there after `kill -9`, since the system keeps it, and
perhaps not after a power failure: nothing is synced, for the checksums in the log decide what is right. The file says
of which cache it is (`kvcache.device.secondary_header`), and nothing about which block lies where: that is the log's.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from events.errors import NoRegularFile
from events.files.safe import OTHERS, create_file, open_own
from events.log.durable import Lock, LockHeld, sync_directory, sync_file, take_lock, write_all
from kvcache.device.secondary_errors import (
    NotASecondaryFile,
    SecondaryFileLocked,
    SecondaryFileUnavailable,
)
from kvcache.device.secondary_header import SecondaryHeader
from kvcache.errors import NotEnoughMemory, UsageError
from kvcache.layout import Layout

if TYPE_CHECKING:
    import torch

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FSTORE = struct.Struct("=Iiqqq")
"""Of macOS, as the three constants: flags, from where, offset, bytes wanted, bytes taken."""
_F_PREALLOCATE, _F_ALLOCATEALL, _F_PEOFPOSMODE = 42, 4, 3
_BYTES_OF_ST_BLOCKS = 512
_open_files: weakref.WeakSet[SecondaryFile] = weakref.WeakSet()


class SecondaryFile:
    """The secondary level of one cache in a file, which is made if it is missing, and locked as long as this lives.

    With `pin` its memory is page-locked for the GPU. Raises a `SecondaryFileError`, in which case the file is as it
    was, NotEnoughMemory where there is no room for it, MemoryError where it cannot be page-locked, and UsageError
    without the package xxhash.
    """

    def __init__(self, path: Path, layout: Layout, *, pin: bool) -> None:
        self.path = path
        self._xxh3_digest, self._xxh3 = _xxh3()
        header = SecondaryHeader.of(layout)
        places, size = header.places()
        self._lock = _locked(path)
        try:
            descriptor = _opened(path, header, size)
            try:
                self._memory = _mapped(descriptor, size, pin)
            finally:
                os.close(descriptor)
        except BaseException:
            self._lock.give_back()
            raise
        self._pools = [
            [(at, blocks, each) for at, each in zip(offsets, sizes, strict=True)]
            for offsets, blocks, sizes in zip(places, header.blocks, header.bytes_per_block, strict=True)
        ]
        whole = self._memory.numpy()
        self._rows: list[list[npt.NDArray[np.uint8]]] = [
            [whole[at : at + blocks * each].reshape(blocks, each) for at, blocks, each in pools]
            for pools in self._pools
        ]
        self.bytes_read = 0
        """For checksums, so far."""
        self._closing = weakref.finalize(self, self._lock.give_back)
        _open_files.add(self)

    def memory(self, group: int, pool: int) -> torch.Tensor:
        """The bytes of a pool; uint8 [blocks * bytes per block]."""
        at, blocks, size = self._pools[group][pool]
        return self._memory[at : at + blocks * size]

    def checksums(self, group: int, slots: npt.NDArray[np.int32]) -> bytes:
        """XXH3 of 64 bits of what lies in these slots, over all pools of the group; 8 bytes each, big-endian."""
        pools = self._rows[group]
        self.bytes_read += len(slots) * sum(rows.shape[1] for rows in pools)
        if len(pools) == 1:
            rows, digest = pools[0], self._xxh3_digest
            return b"".join([digest(rows[slot]) for slot in slots.tolist()])
        return b"".join([self._over_pools(pools, slot) for slot in slots.tolist()])

    def _over_pools(self, pools: list[npt.NDArray[np.uint8]], slot: int) -> bytes:
        checksum = self._xxh3()
        for rows in pools:
            checksum.update(rows[slot])
        digest: bytes = checksum.digest()
        return digest

    def close(self) -> None:
        """Unlock the file. Its memory stays as long as somebody has a view of it, and must not be written any more."""
        self._closing()

    def disown(self) -> None:
        """In a forked child: the lock is the parent's."""
        if self._closing.detach() is not None:
            self._lock.disown()


def _xxh3() -> tuple[Callable[..., bytes], Callable[[], Any]]:
    try:
        import xxhash
    except ImportError:
        raise UsageError("secondary_path needs xxhash: install kvcache[hash]") from None
    return xxhash.xxh3_64_digest, xxhash.xxh3_64


def _locked(path: Path) -> Lock:
    try:
        return take_lock(path.with_name(path.name + ".lock"))
    except LockHeld as held:
        raise SecondaryFileLocked(path, held.holder) from None
    except NoRegularFile:
        raise SecondaryFileUnavailable(path, "what has the name of its lock file is something else") from None
    except (OSError, ValueError) as error:
        raise SecondaryFileUnavailable(path, _why(error)) from error


def _opened(path: Path, header: SecondaryHeader, size: int) -> int:
    """The file, open for reading and writing, with all its room taken."""
    try:
        try:
            descriptor = open_own(path, os.O_RDWR)
        except FileNotFoundError:
            return _created(path, header, size)
        try:
            status = os.fstat(descriptor)
            header.refuse_other(path, _beginning(descriptor, len(header.pack())), status.st_size)
            _reserve(descriptor, path, size)
            if status.st_mode & (OTHERS | stat.S_IRWXG):
                # As a copy may have become: K and V are for nobody else to read. Root's cannot be changed by others.
                with suppress(PermissionError):
                    os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
    except (IsADirectoryError, NoRegularFile):
        raise NotASecondaryFile(path) from None
    except OSError as error:
        raise SecondaryFileUnavailable(path, _why(error)) from error
    return descriptor


def _beginning(descriptor: int, size: int) -> bytes:
    """At least as much as our header would have: one that is longer is another cache's, and must be told apart."""
    return os.pread(descriptor, max(size, 1 << 20), 0)


def _created(path: Path, header: SecondaryHeader, size: int) -> int:
    """A new file; it gets its name when all its room is taken and its header is on disk."""
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
    """Let the disk, or the memory of a tmpfs, be taken for all of the file; what is there stays."""
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
        where, lower = f"room in {path.parent}", "secondary_blocks or host_cache_size"
        raise NotEnoughMemory(size, disk.f_bavail * disk.f_frsize, where, lower) from None


def _allocate(descriptor: int, size: int) -> None:
    """Have the system take room for so many bytes of a file, which has them then. Raises OSError if it cannot."""
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        allocate(descriptor, 0, size)
        return
    # macOS takes room behind what a file has; elsewhere the command is unknown (EINVAL).
    missing = size - os.fstat(descriptor).st_blocks * _BYTES_OF_ST_BLOCKS
    if missing > 0:
        request = _FSTORE.pack(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, missing, 0)
        fcntl.fcntl(descriptor, _F_PREALLOCATE, request)
    os.ftruncate(descriptor, size)


def _mapped(descriptor: int, size: int, pin: bool) -> torch.Tensor:
    from cuda_ops.host_memory import mapped_file

    return mapped_file(descriptor, size, pin=pin)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def _disown_all() -> None:
    for file in list(_open_files):
        file.disown()


os.register_at_fork(after_in_child=_disown_all)
