"""Human-readable durations and sizes, in a URL or a setting: ``50ms``, ``1.5s``, ``1MiB``, ``0``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from events.errors import shortened

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)", re.ASCII)
_SECONDS = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
}
_BYTES = {
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_DIGITS = 40
"""Limit of digits in a duration or size."""


def parse_seconds(text: str) -> float:
    """Parse a duration into seconds. Raises ValueError without a unit, except for 0."""
    return float(_parse(text, _SECONDS, "50ms or 1s"))


def parse_bytes(text: str) -> int:
    """Parse a size into bytes, rounded down; KiB are 1024, KB 1000. Raises ValueError without a unit, except for 0."""
    return int(_parse(text, _BYTES, "512KiB or 64MiB"))


def _parse(text: str, units: Mapping[str, int | Fraction], example: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip())
    if match is not None and len(match[1]) <= _DIGITS:
        number, unit = Fraction(match[1]), match[2]
        if unit in units:
            return number * units[unit]
        if number == 0 and not unit:
            return number
    needs = f"needs a number and one of the units {', '.join(units)}, as in {example}"
    raise ValueError(shortened(f"{text!r} {needs}"))
