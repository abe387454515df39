"""Free host memory, and a check that the bookkeeping of a cache's blocks fits into it.

The pools compare their own bytes. But a cache may run without pools, and an absurd number of blocks should be an error
at the start rather than a process that grows until the system kills it.
"""

from __future__ import annotations

import os
from pathlib import Path

from events.types import SLIDING
from kvcache.config import KVCacheConfig
from kvcache.errors import NotEnoughMemory
from kvcache.layout import Layout

BOOKKEEPING_BYTES_PER_SLOT = 24
"""Approximate size of one slot in lists of blank slots and of owners, with a copy while the state is written down."""
_SLIDING_BYTES_PER_SLOT = 44
"""Additional size in a sliding window: a number in each of the columns of `kvcache.fold.sliding_group`."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def served_layout(config: KVCacheConfig) -> Layout:
    """Return the layout of a cache that a manager can serve; raises `NotEnoughMemory` for others."""
    layout = Layout.of(config)
    needed = sum(bookkeeping_bytes(sum(group.num_blocks), group.kind) for group in layout.groups)
    free = free_bytes()
    if needed > free:
        raise NotEnoughMemory(
            needed,
            free,
            "host memory for the metadata of its blocks",
            "primary_blocks, max_tokens, primary_bytes, secondary_blocks or host_cache_size",
        )
    return layout


def bookkeeping_bytes(slots: int, kind: str) -> int:
    """Estimate the host memory for a window with this number of slots, in addition to their K/V."""
    return slots * (BOOKKEEPING_BYTES_PER_SLOT + (_SLIDING_BYTES_PER_SLOT if kind == SLIDING else 0))


def free_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that this process may still take: the kernel's available memory, or the rest of a container's limit.

    If neither is known (not on Linux), all the physical memory, which is an upper bound.
    """
    known = [free for free in (_of_system(meminfo), _of_container(cgroup)) if free is not None]
    return min(known, default=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _of_system(meminfo: Path) -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """Return the rest of the container's limit; pages of files can be reclaimed, so they count as free."""
    try:
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(fields.get("inactive_file", 0)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return None
