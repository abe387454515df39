"""Token ids come in many containers and leave as packed int32, or as an error that does not show them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.errors import InvalidTokens
from kvcache.tokens import pack_counts, pack_tokens

PACKED = bytes([1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 127])
TOKENS = [1, 2, 2**31 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        array("i", TOKENS),
        array("Q", TOKENS),
        memoryview(array("i", TOKENS)),
        *[np.array(TOKENS, kind) for kind in ("<i4", ">i4", "u4", "i8", "u8")],
        np.array([1, 0, 2, 0, 2**31 - 1, 0])[::2],
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        [np.int64(token) for token in TOKENS],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_containers_hold_the_same_tokens(tokens: Any) -> None:
    """Lists, tuples, arrays, views, numpy and torch of any integer type and byte order give the same bytes."""
    assert pack_tokens(tokens) == PACKED


@pytest.mark.parametrize("tokens", [[], (), array("i"), np.array([], np.int32), np.array([])])
def test_no_tokens_are_no_bytes(tokens: Any) -> None:
    """An empty row of any kind is empty."""
    assert pack_tokens(tokens) == b""


SECRET = 1234567
WRONG = [
    ([SECRET, -SECRET], 1),
    ([SECRET, SECRET << 31], 1),
    ([SECRET, 2**31], 1),
    ([SECRET, -(2**40)], None),
    ([SECRET, 2**100], 1),
    ([SECRET, 1.0], 1),
    ([SECRET, None], 1),
    ([SECRET, "1"], 1),
    ([[SECRET]], 0),
    (np.array([SECRET, -1]), 1),
    (np.array([SECRET, 2**31]), 1),
    (np.array([SECRET, 2**63], np.uint64), 1),
    (np.array([float(SECRET)]), None),
    (np.array([True]), None),
    (np.array([[SECRET]]), None),
    (np.array(SECRET), None),
    (torch.tensor([float(SECRET)]), None),
    ("1234567", None),
    (b"1234567", None),
    (None, None),
    ({SECRET}, None),
    (SECRET, None),
    (iter([SECRET]), None),
]


@pytest.mark.parametrize(("tokens", "position"), WRONG, ids=lambda value: type(value).__name__)
def test_wrong_tokens_are_refused_without_being_shown(tokens: Any, position: int | None) -> None:
    """What is not a row of token ids raises InvalidTokens, with the place of the first bad one but never its value."""
    with pytest.raises(InvalidTokens) as raised:
        pack_tokens(tokens)
    assert position is None or raised.value.position == position
    assert "1234567" not in str(raised.value)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [0, 3], [-1, 4], [1, 1], [2**40, 1]])
def test_counts_must_add_up(counts: list[int]) -> None:
    """Counts give each of the sequences at least one of the tokens, and all of the tokens to somebody."""
    with pytest.raises(InvalidTokens):
        pack_counts(counts, 2, 3)


def test_counts_are_packed() -> None:
    """Counts that add up become unsigned 32-bit numbers, also out of numpy."""
    assert pack_counts(np.array([1, 2]), 2, 3) == array("I", [1, 2])  # type: ignore[arg-type]
