"""Durations and sizes as people write them in a URL: ``50ms``, ``1.5s``, ``1MiB``, ``0``."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_seconds(text: str) -> float:
    """Seconds in a duration. Raises ValueError without a unit, except for 0."""
    return _parse(text, _SECONDS)


def parse_bytes(text: str) -> int:
    """Bytes in a size. Raises ValueError without a unit, except for 0."""
    return int(_parse(text, _BYTES))


def _parse(text: str, units: dict[str, float] | dict[str, int]) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is not None:
        number, unit = float(match[1]), match[2]
        if unit in units:
            return number * units[unit]
        if number == 0 and not unit:
            return 0.0
    example = "50ms or 1s" if "ms" in units else "512KiB or 64MiB"
    raise ValueError(f"{text!r} needs a number and one of the units {', '.join(units)}, as in {example}")
