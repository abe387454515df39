"""Host memory that is free: what the kernel calls available, or what a container's limit leaves if that is less."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that this process may still take: of the system, or of its container.

    Where neither is known (not on Linux), all the physical memory, which is an upper bound.
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
    """What its limit leaves; pages of files can be given back, so they count as free."""
    try:
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(fields.get("inactive_file", 0)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return None
