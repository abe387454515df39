"""The types of single arguments: each refuses with what it would have accepted."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError


def natural(text: str) -> int:
    """An integer, at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def positive(text: str) -> int:
    """An integer, at least 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def integer(text: str) -> int:
    """Any integer."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an integer") from None


def seconds(text: str) -> float:
    """A finite number of seconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
