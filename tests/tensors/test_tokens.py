"""Token ids come in many containers and leave as packed int32, or as an error that does not show them."""

from __future__ import annotations

import traceback
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.errors import InvalidTokens, PromptTooLong
from kvcache.inputs import pack_counts, pack_tokens

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


class Odd:
    """Converts itself to whatever was asked for, or raises it."""

    def __init__(self, answer: int | Exception) -> None:
        self.answer = answer

    def __index__(self) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class OddArray:
    """Has a length, but its content is an error that quotes a token."""

    def __len__(self) -> int:
        return 1

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        raise RuntimeError(str(SECRET))


WRONG = [
    ([SECRET, -SECRET], 1),
    ([SECRET, SECRET << 31], 1),
    ([SECRET, 2**31], 1),
    ([SECRET, -(2**40)], None),
    ([SECRET, 2**100], 1),
    ([SECRET, 1.0], 1),
    ([SECRET, 0, True, 1], 2),
    ((False, SECRET), 0),
    ([SECRET, 256, *range(300), 1, 0, 1, True, False], 305),
    ([SECRET, True, SECRET], 1),
    ([*[1] * 1000, False], 1000),
    ([*[SECRET] * 1000, True, SECRET], 1000),
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
    ([SECRET, Odd(RuntimeError(str(SECRET)))], 1),
    ([SECRET, Odd(SECRET << 31)], 1),
    ([SECRET, Odd(-SECRET)], 1),
    (OddArray(), None),
]


@pytest.mark.parametrize(("tokens", "position"), WRONG, ids=lambda value: type(value).__name__)
def test_wrong_tokens_are_refused_without_being_shown(tokens: Any, position: int | None) -> None:
    """What is not a row of token ids raises InvalidTokens, with the place of the first bad one but never its value."""
    with pytest.raises(InvalidTokens) as raised:
        pack_tokens(tokens)
    assert position is None or raised.value.position == position
    shown = "".join(traceback.format_exception(raised.value)).replace(__file__, "")
    assert "1234567" not in str(raised.value)
    assert not any("1234567" in line for line in shown.splitlines() if line.startswith("RuntimeError"))


class OnGPU(torch.Tensor):
    """A tensor as it is on a GPU, as far as numpy and messages go."""

    device = torch.device("cuda", 1)

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        raise TypeError("can't convert cuda:1 device type tensor to numpy")


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            torch.tensor([SECRET], dtype=torch.bfloat16),
            (
                "not a tensor of torch.bfloat16 on cpu, which may have rounded them: "
                "keep them as integers and pass tokens.cpu()"
            ),
        ),
        (torch.tensor([float(SECRET)]), "token ids must be integers, not float32"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            "a tensor of torch.int64 on meta has no values: pass a tensor with the token ids",
        ),
        (
            torch.tensor([SECRET]).as_subclass(OnGPU),
            "a tensor of torch.int64 on cuda:1 cannot be read: pass tokens.cpu()",
        ),
    ],
)
def test_tensors_are_refused_with_what_to_do(tokens: Any, says: str) -> None:
    """Type and device say what is wrong."""
    with pytest.raises(InvalidTokens) as raised:
        pack_tokens(tokens)
    assert str(raised.value).endswith(says)


@pytest.mark.parametrize(
    "tokens",
    [
        range(10**13),
        np.broadcast_to(np.int64(5), (2**40,)),
        torch.tensor([5]).expand(2**40),
        np.zeros(9, np.int32),
    ],
    ids=["range", "numpy", "torch", "one more"],
)
@pytest.mark.timeout(20)
def test_too_many_are_refused_before_any_is_read(tokens: Any) -> None:
    """A row that only describes its tokens is measured first, so that it takes neither time nor memory."""
    with pytest.raises(PromptTooLong) as raised:
        pack_tokens(tokens, 8)
    assert (raised.value.length, raised.value.limit) == (len(tokens), 8)


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [1, 1, 1],
        [0, 3],
        [-1, 4],
        [1, 1],
        [2**40, 1],
        [1.0, 2.0],
        [True, 2],
        (2, True),
        np.array([True, True]),
        ["1", "2"],
        [[1], [2]],
        "12",
        b"12",
        b"\1\0\0\0\2\0\0\0",
        3,
        iter([1, 2]),
        np.array([1.0, 2.0]),
        [1, Odd(RuntimeError())],
    ],
)
def test_counts_must_add_up(counts: Any) -> None:
    """Counts give each of the sequences at least one of the tokens, and all of the tokens to somebody."""
    with pytest.raises(InvalidTokens):
        pack_counts(counts, 2, 3)


def test_counts_are_packed() -> None:
    """Counts that add up become unsigned 32-bit numbers, also out of numpy."""
    assert pack_counts(np.array([1, 2]), 2, 3) == array("I", [1, 2])
