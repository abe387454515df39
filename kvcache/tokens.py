"""Token ids as they come from engines, turned into packed int32 symbols.

A plain token is its own symbol (0 <= token < 2**31). Errors never show a token: it is part of a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvcache.errors import InvalidTokens

Tokens = Iterable[int] | Any
"""A list or tuple of ints, `array`, numpy array, CPU torch tensor, or any buffer of integers."""

_LIMIT = 2**31


def pack_tokens(tokens: Tokens) -> bytes:
    """The tokens as int32 LE; raises `InvalidTokens` if they are not one row of numbers in [0, 2**31)."""
    if isinstance(tokens, list | tuple):
        return _pack_list(tokens)
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidTokens("text or bytes were given: pass token ids as integers (a list, array, or tensor)")
    return _pack_buffer(tokens)


def _pack_list(tokens: list[Any] | tuple[Any, ...]) -> bytes:
    try:
        packed = array("i", tokens)
    except OverflowError:
        position = next(i for i, t in enumerate(tokens) if not -_LIMIT <= t < _LIMIT)
        raise InvalidTokens("a token id must be below 2**31", position) from None
    except TypeError:
        wrong = next((i for i, t in enumerate(tokens) if not hasattr(t, "__index__")), None)
        raise InvalidTokens("a token id must be an integer", wrong) from None
    if packed and min(packed) < 0:
        raise InvalidTokens("a token id must not be negative", next(i for i, t in enumerate(packed) if t < 0))
    return packed.tobytes()


def _pack_buffer(tokens: Any) -> bytes:
    try:
        values = np.asarray(tokens)
    except Exception as error:
        raise InvalidTokens(f"{type(tokens).__name__} cannot be read as an array of integers") from error
    if values.ndim != 1:
        raise InvalidTokens(f"one row of token ids is needed, not an array of {values.ndim} dimensions")
    if values.size == 0:
        return b""
    if values.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids must be integers, not {values.dtype}")
    if values.dtype != np.int32 and int(values.max()) >= _LIMIT:
        raise InvalidTokens("a token id must be below 2**31", int((values >= _LIMIT).argmax()))
    if int(values.min()) < 0:
        raise InvalidTokens("a token id must not be negative", int((values < 0).argmax()))
    return values.astype("<i4", copy=False).tobytes()


def pack_counts(counts: Sequence[int], num_sequences: int, num_tokens: int) -> array[int]:
    """How many of `num_tokens` tokens belong to each sequence, as uint32; raises `InvalidTokens`."""
    if len(counts) != num_sequences or min(counts, default=1) < 1 or sum(counts) != num_tokens:
        raise InvalidTokens(
            f"counts must give each of {num_sequences} sequences at least 1 of the {num_tokens} tokens"
        )
    return array("I", counts)
