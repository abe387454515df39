"""Host memory that a GPU can copy to and from by itself.

It is mapped here and then registered with the driver, because torch's own pinned allocator rounds every request up to a
power of two, which for a pool is up to twice the memory. Chunk by chunk it is zeroed, by all of torch's threads, since
page faults are most of the cost, and page-locked: a refusal by the system is known before all of it was touched.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

CHUNK_BYTES = 1 << 30
"""Bytes registered at once, about: one piece of 512 GiB is too much for drivers, one of 2 GiB for some kernels."""
Progress = Callable[[int], None]
"""Called with the number of further bytes that are ready."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, on Linux."""
_MPOL_BIND = 2
_NODES = 1024


class PageLocker(Protocol):
    """The driver's functions for page-locking."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock memory. Raises RuntimeError if refused."""
        ...

    def unregister(self, addresses: Sequence[int]) -> None:
        """Undo it, once no copies use the memory."""
        ...


class Stretch(NamedTuple):
    """A part of a mapping with blocks of one size, in bytes."""

    begin: int
    num_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of memory."""

    hugepages: Literal["system", "always", "never"] = "system"
    """Use of huge pages: left to the system, wherever possible, or not at all."""
    numa_node: int | None = None
    """The node of the machine; None: the system chooses."""


def blocks_per_chunk(block_bytes: int) -> int:
    """Return the blocks per page-locked chunk: whole pages, at least one block. No copy may cross its edge."""
    aligned = math.lcm(block_bytes, mmap.PAGESIZE)
    return max(1, CHUNK_BYTES // aligned) * (aligned // block_bytes)


def host_zeros(
    num_bytes: int,
    block_bytes: int,
    locker: PageLocker | None,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Allocate host memory for blocks of `block_bytes`, zeroed, and page-locked by `locker`; uint8 [num_bytes].

    It is freed with its last view. Raises MemoryError if the system refuses to map or lock this much, or does not
    support `placement`.
    """
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    region = _mapped(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "host memory")
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    _place(region, tensor.data_ptr(), placement or Placement())
    for begin, end in _chunks(Stretch(0, num_bytes, block_bytes)):
        tensor[begin:end].zero_()
        if locker is not None:
            region.lock(locker, tensor.data_ptr() + begin, end - begin)
        if progress is not None:
            progress(end - begin)
    return tensor


def mapped_file(
    descriptor: int, num_bytes: int, stretches: Sequence[Stretch], locker: PageLocker | None
) -> torch.Tensor:
    """Map the first bytes of a file of that size; uint8 [num_bytes]. Writes to it go to the file.

    It is unmapped with its last view, and the descriptor may be closed at once. `locker` page-locks its stretches,
    which begin with a page: raises MemoryError if that is refused, as for files on disks by many systems, or if it
    cannot be mapped.
    """
    region = _mapped(descriptor, num_bytes, mmap.MAP_SHARED, "a file")
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    if locker is not None:
        for begin, end in (chunk for stretch in stretches for chunk in _chunks(stretch)):
            region.lock(locker, tensor.data_ptr() + begin, end - begin)
    return tensor


def _chunks(stretch: Stretch) -> list[tuple[int, int]]:
    """Return the start and end of each part that is page-locked at once."""
    step, end = blocks_per_chunk(stretch.block_bytes) * stretch.block_bytes, stretch.begin + stretch.num_bytes
    return [(begin, min(begin + step, end)) for begin in range(stretch.begin, end, step)]


class _LockedRegion(mmap.mmap):
    """A mapping that is unregistered before it is unmapped."""

    _locker: PageLocker | None = None
    _locked: tuple[tuple[int, int], ...] = ()
    """Address and bytes of each chunk."""

    def lock(self, locker: PageLocker, address: int, num_bytes: int) -> None:
        self._locker = locker
        try:
            locker.register(address, num_bytes)
        except RuntimeError as error:
            so_far = sum(size for _, size in self._locked)
            raise MemoryError(
                f"cannot page-lock {num_bytes:,} bytes of host memory, after {so_far:,} of {len(self):,} ({error}; "
                f"ulimit -l is {_lockable()}): lower host_cache_size or secondary_blocks, raise the limit of locked "
                "memory, or let secondary_path be on a tmpfs, as /dev/shm is"
            ) from error
        self._locked = (*self._locked, (address, num_bytes))

    def __del__(self) -> None:
        if self._locker is not None and self._locked:
            with suppress(RuntimeError):  # a broken device keeps nothing registered
                self._locker.unregister([address for address, _ in self._locked])


def _lockable() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"


def _place(region: mmap.mmap, address: int, placement: Placement) -> None:
    """Set the placement of untouched memory."""
    if placement.hugepages != "system":
        name = {"always": "MADV_HUGEPAGE", "never": "MADV_NOHUGEPAGE"}[placement.hugepages]
        try:
            region.madvise(vars(mmap)[name])
        except (KeyError, OSError):
            raise MemoryError(
                f"hugepages={placement.hugepages}: this system has no transparent huge pages; set it to system"
            ) from None
    if placement.numa_node is not None:
        number = _MBIND.get(platform.machine()) if sys.platform == "linux" else None
        mask = (ctypes.c_ulong * (_NODES // 64))()
        node = placement.numa_node
        refused = number is None or node >= _NODES
        if not refused:
            mask[node // 64] = 1 << node % 64
            call = ctypes.CDLL(None).syscall
            size, most = ctypes.c_size_t(len(region)), ctypes.c_ulong(_NODES + 1)
            refused = call(number, ctypes.c_void_p(address), size, _MPOL_BIND, mask, most, 0) != 0
        if refused:
            raise MemoryError(f"numa_node={node}: this machine has no memory on such a node; set it to none")


def _mapped(descriptor: int, num_bytes: int, flags: int, what: str) -> _LockedRegion:
    """Map memory that children do not inherit.

    After a fork the parent's pages would be copied on write, and the GPU would keep the old ones.
    """
    try:
        region = _LockedRegion(descriptor, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes of {what}: {error.strerror}") from error
    if hasattr(mmap, "MADV_DONTFORK"):
        region.madvise(mmap.MADV_DONTFORK)
    return region
