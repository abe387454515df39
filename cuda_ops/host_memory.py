"""Host memory that a GPU can copy to and from by itself.

It is mapped here and then registered with the driver, because torch's own pinned allocator
rounds every request up to a power of two, which for a pool is up to twice the memory.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch

CHUNK_BYTES = 1 << 30
"""About so much is registered at once: one piece of 512 GiB is too much for drivers, one of 2 GiB for some kernels."""


def blocks_per_chunk(block_bytes: int) -> int:
    """So many blocks are page-locked together; whole pages, at least one. No copy may go beyond such a chunk."""
    aligned = math.lcm(block_bytes, mmap.PAGESIZE)
    return max(1, CHUNK_BYTES // aligned) * (aligned // block_bytes)


def pinned_zeros(num_bytes: int) -> torch.Tensor:
    """Allocate page-locked host memory, zeroed; uint8 [num_bytes]. It is freed with its last view.

    Raises MemoryError if the system does not let so much be mapped or locked.
    """
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    region = _mapped(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "host memory")
    # Zeroed by torch's threads: page faults, most of the cost of pinning, then happen in parallel.
    tensor = torch.frombuffer(region, dtype=torch.uint8).zero_()
    region.register(tensor.data_ptr())
    return tensor


def mapped_file(descriptor: int, num_bytes: int, *, pin: bool) -> torch.Tensor:
    """Map the first bytes of a file, which has them; uint8 [num_bytes]. What is written to it is in the file.

    It is unmapped with its last view, and the descriptor may be closed at once. With `pin` it is page-locked: raises
    MemoryError where that is refused, as for files of disks by many systems, and where it cannot be mapped.
    """
    region = _mapped(descriptor, num_bytes, mmap.MAP_SHARED, "a file")
    tensor = torch.frombuffer(region, dtype=torch.uint8)
    if pin:
        region.register(tensor.data_ptr())
    return tensor


class _PinnedRegion(mmap.mmap):
    """A mapping that is unregistered before it is unmapped."""

    _address: int | None = None

    def register(self, address: int) -> None:
        status = int(_cudart().cudaHostRegister(address, len(self), 0))
        if status != 0:
            raise MemoryError(
                f"cannot page-lock {len(self):,} bytes of host memory (CUDA error {status}): "
                "lower host_cache_size or secondary_blocks, raise the limit of locked memory (ulimit -l), or let "
                "secondary_path be on a tmpfs, as /dev/shm is"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:
            _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _mapped(descriptor: int, num_bytes: int, flags: int, what: str) -> _PinnedRegion:
    """Map memory, which children do not get: after a fork the parent's pages would be copied on write, and the GPU
    would keep the old ones.
    """
    try:
        region = _PinnedRegion(descriptor, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes of {what}: {error.strerror}") from error
    if hasattr(mmap, "MADV_DONTFORK"):
        region.madvise(mmap.MADV_DONTFORK)
    return region
