"""Messages of a feed, made without a feed."""

from __future__ import annotations

from events.formats.vllm import Message
from tests.support.feeds.publisher import batch


def message(seq: int, ts: float = 1.0) -> Message:
    return Message(b"kv", seq, batch(ts=ts))
