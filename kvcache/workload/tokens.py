"""Token ids for traces that only record which tokens are equal.

A trace block is named by a number; equal numbers stand for equal tokens. The ids are drawn from a
splitmix64 stream that starts at the mixed number, so they need no storage, every process makes the
same ones, and blocks with different numbers share a token only by chance, and never the first. Outputs use separate
ids: the output of a request never equals another one's prompt.

All ids fit in int32, the type of every token column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TRACE_BLOCK_TOKENS = 512
"""Tokens per number of a trace, unless its form has another size."""
PROMPT_VOCABULARY = 128_000
"""Upper bound of prompt ids, except for the first of a block; output ids are in
[PROMPT_VOCABULARY, 2 * PROMPT_VOCABULARY)."""
_FIRST_TOKENS = 2 * PROMPT_VOCABULARY
"""Lower bound of the unique first ids of blocks, so that partial matches never occur by chance."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]


def mix64(values: Uint64s) -> Uint64s:
    """Scramble 64-bit numbers: the finalizer of splitmix64, a bijection."""
    mixed = values ^ (values >> np.uint64(30))
    mixed = mixed * _MULTIPLY_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLY_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def prompt_tokens(
    hash_ids: Sequence[int], length: int, seed: int = 0, block_tokens: int = TRACE_BLOCK_TOKENS
) -> Int32s:
    """Return the first `length` tokens of the blocks `hash_ids`; `seed` selects the vocabulary order."""
    used = hash_ids[: -(-length // block_tokens)]
    numbers = np.array(used, dtype=np.uint64)
    tokens = _draw(_streams(numbers, seed), block_tokens)
    tokens[:, 0] = numbers % np.uint64(2**31 - _FIRST_TOKENS) + np.uint64(_FIRST_TOKENS)
    return tokens.reshape(-1)[:length]


def output_tokens(index: int, length: int, seed: int = 0) -> Int32s:
    """Return the tokens that request number `index` generates; no prompt holds any of them."""
    stream = _streams(np.array([index], dtype=np.uint64), seed)
    tokens = _draw(stream, length).reshape(-1)
    tokens += np.int32(PROMPT_VOCABULARY)
    return tokens


def _streams(numbers: Uint64s, seed: int) -> Uint64s:
    salt = mix64(np.array([seed & (2**64 - 1)], dtype=np.uint64))
    return mix64(numbers + salt)


def _draw(streams: Uint64s, count: int) -> Int32s:
    """Draw `count` ids from each stream; shape [len(streams), count]."""
    steps = np.arange(count, dtype=np.uint64) * _GAMMA
    drawn = mix64(streams[:, None] + steps[None, :])
    return (drawn % np.uint64(PROMPT_VOCABULARY)).astype(np.int32)
