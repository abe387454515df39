"""Token ids as they come from engines, turned into packed int32 symbols.

A plain token is its own symbol (0 <= token < 2**31). Errors never show a token: it is part of a prompt.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from kvcache.errors import InvalidTokens, PromptTooLong

Tokens = Sequence[int] | Any
"""A list or tuple of ints, `array`, numpy array, CPU torch tensor, or any buffer of integers. No iterator: how many
there are must be known before any is looked at."""

_LIMIT = 2**31
_FEW = 100


def pack_tokens(tokens: Tokens, limit: int | None = None) -> bytes:
    """The tokens as int32 LE; raises `InvalidTokens` if they are not one row of numbers in [0, 2**31).

    More than `limit` tokens raise `PromptTooLong`, those that are only described (ranges, repeated views) before they
    take any memory.
    """
    if isinstance(tokens, list | tuple):
        return _pack_list(tokens)
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidTokens("text or bytes were given: pass token ids as integers (a list, array, or tensor)")
    return _pack_buffer(tokens, limit)


def _pack_list(tokens: list[Any] | tuple[Any, ...]) -> bytes:
    try:
        # As unsigned numbers, which refuses negative ones; three times as fast as `array`.
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        # True and False pack as 1 and 0; the second byte of few other tokens is 0.
        flagged = 0 in packed[1::4] and _has_flag(tokens, packed)
    except Exception:  # noqa: BLE001  whatever an item's __index__ raised may quote a token
        raise InvalidTokens(*_first_wrong(tokens)) from None
    # A number is below 2**31 if the highest of its bytes is below 128, that is ASCII.
    if flagged or not packed[3::4].isascii():
        raise InvalidTokens(*_first_wrong(tokens))
    return packed


def _has_flag(tokens: Sequence[Any], packed: bytes) -> bool:
    """Whether True or False is among the tokens. To look at the type of each takes longer than to pack it."""
    if len(tokens) > _FEW:
        small = np.flatnonzero(np.frombuffer(packed, "<u4") < 2)
        tokens = [tokens[position] for position in small.tolist()]
    return bool in map(type, tokens)


def _first_wrong(tokens: Iterable[Any]) -> tuple[str, int | None]:
    """Why a token cannot be packed, and its position."""
    for position, token in enumerate(tokens):
        try:
            number = index(token)
        except Exception:  # noqa: BLE001
            return "a token id must be an integer", position
        if type(token) is bool:
            return "a token id must be an integer, not True or False", position
        if number < 0:
            return "a token id must not be negative", position
        if number >= _LIMIT:
            return "a token id must be below 2**31", position
    return "they change while they are read", None


def _pack_buffer(tokens: Any, limit: int | None) -> bytes:
    try:
        length = len(tokens)
        values = np.asarray(tokens) if limit is None or length <= limit else None
    except Exception:  # noqa: BLE001
        raise InvalidTokens(_unreadable(tokens)) from None
    if values is None:
        raise PromptTooLong(length, limit or 0)
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


def _unreadable(tokens: Any) -> str:
    """Why numpy cannot read something, and of a torch tensor what to do."""
    if ("torch", "Tensor") not in {(kind.__module__, kind.__name__) for kind in type(tokens).__mro__}:
        return f"{type(tokens).__name__} cannot be read as an array of integers"
    of = f"a tensor of {tokens.dtype} on {tokens.device}"
    if tokens.is_meta:
        return f"{of} has no values: pass the token ids themselves"
    if tokens.is_floating_point():
        return f"token ids must be integers, not {of}, which rounds them: keep them as integers, and pass tokens.cpu()"
    return f"{of} cannot be read: pass tokens.cpu()"


def pack_counts(counts: Any, num_sequences: int, num_tokens: int) -> array[int]:
    """How many of `num_tokens` tokens belong to each sequence, as uint32; raises `InvalidTokens`."""
    packed = _packed_counts(counts, num_sequences)
    if packed is None or min(packed, default=1) < 1 or sum(packed) != num_tokens:
        raise InvalidTokens(
            f"counts must give each of {num_sequences} sequences at least 1 of the {num_tokens} tokens"
        )
    return packed


def pack_naturals(counts: Any, num_sequences: int) -> array[int]:
    """A number of tokens for each sequence, from 0 on, as uint32; raises `InvalidTokens`."""
    packed = _packed_counts(counts, num_sequences)
    if packed is None:
        raise InvalidTokens(
            f"counts must give each of {num_sequences} sequences a number of tokens, 0 or more"
        )
    return packed


def _packed_counts(counts: Any, num_sequences: int) -> array[int] | None:
    """A number from 0 on for each sequence; None: these are no such numbers."""
    try:
        # The bytes of bytes would be taken for packed numbers.
        fitting = len(counts) == num_sequences and not isinstance(counts, bytes | bytearray)
        return array("I", counts) if fitting and bool not in map(type, counts) else None
    except Exception:  # noqa: BLE001
        return None
