"""Packed columns made of integers, as events carry them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def pack_i32(values: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Pack integers as int32 LE."""
    if not isinstance(values, np.ndarray):
        values = list(values)
    return np.asarray(values, dtype="<i4").tobytes()


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers as uint32 LE."""
    return np.asarray(list(values), dtype="<u4").tobytes()


def pack_i64(values: Iterable[int]) -> bytes:
    """Pack integers as int64 LE."""
    return np.asarray(list(values), dtype="<i8").tobytes()
