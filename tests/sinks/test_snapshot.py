"""The state that is kept for who comes late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest

from events.feed.changes import AnyChange, Cleared, Stored
from events.types import GroupCreated, Namespace
from sinks.router.feed import FeedSnapshot
from sinks.router.replay import EncodedState
from tests.support.feeds.feed_source import BLOCK, names, tokens


def changes(count: int) -> Iterator[AnyChange]:
    for handle in range(count):
        yield Stored(0, 0, names(handle, 4), b"", tokens(handle, 4), BLOCK, Namespace())


def encode(reported: Sequence[AnyChange], ts: float, groups: Sequence[GroupCreated]) -> bytes:
    return b"".join(change.names if isinstance(change, Stored) else b"C" for change in reported)


def snapshot(count: int, piece_bytes: int = 4000) -> EncodedState:
    return EncodedState(FeedSnapshot(7, 1.0, chain([Cleared()], changes(count)), ()), encode, piece_bytes)


def test_is_encoded_piece_by_piece() -> None:
    """Each call does at least a piece, and the pieces tell everything once, in order, behind "cleared"."""
    made = snapshot(100)
    calls = 1
    while not made.advance(0):
        assert len(made.pieces) == calls
        calls += 1
    assert made.ready
    assert calls > 10
    assert b"".join(made.pieces) == b"C" + b"".join(names(handle, 4) for handle in range(100))


def test_fits_into_few_payloads() -> None:
    """As many as there is room for, never more, and nothing is left out."""
    made = snapshot(100)
    assert made.advance(1e6)
    for count in (1, 2, 3, len(made.pieces), len(made.pieces) + 5):
        payloads = list(made.in_payloads(count, b"".join))
        assert 1 <= len(payloads) <= count
        assert b"".join(payloads) == b"".join(made.pieces)


def test_what_is_sent_meanwhile_belongs_to_it() -> None:
    """Batches count from its own number on, while it is encoded and after."""
    made = snapshot(100)
    made.append(b"x" * 10)
    assert (made.ready, made.last_seq) == (False, 8)
    assert made.advance(1e6)
    made.append(b"y")
    assert (made.last_seq, made.tail) == (9, [b"x" * 10, b"y"])


def test_is_worn_when_sending_anew_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more was sent than the state takes, and never while it is encoded."""
    monkeypatch.setattr("sinks.router.replay.MIN_TAIL_BYTES", least := 4000)
    made = snapshot(1)
    made.append(b"x" * (least + 1))
    assert not made.is_stale
    assert made.advance(1e6)
    assert made.is_stale
    large = snapshot(2 * least // 32)
    assert large.advance(1e6)
    large.append(b"x" * (least + 1))
    assert not large.is_stale
