"""The resident memory of this process."""

from __future__ import annotations

from pathlib import Path

STATM = Path("/proc/self/statm")
PAGE = 4096


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * PAGE
