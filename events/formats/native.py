"""The native format: each message is one batch of the cache's own events, whole, as msgpack or JSON.

A batch with the first event `EpochStarted` has the whole state, as the first batch of an epoch and a snapshot do: later
batches continue from there, whatever was before. Readers that come late, or have missed batches, begin with one. A
batch without events is a heartbeat, with the number of the last batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from events.codec import decode_batch, encode_batch, to_json
from events.errors import EventDecodeError
from events.types import EpochStarted, EventBatch, Gap, StateExported

Encoding = Literal["msgpack", "json"]
_BEGINNINGS = ("EpochStarted", "Gap")
"""First events of batches that make earlier ones worthless."""
_JSON_BEGINS = b"{"


class Origin(NamedTuple):
    """The log or cache by which batches are numbered."""

    log_id: bytes
    epoch: int


class _PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ts: int
    events: list[msgspec.Raw]


class _PackedEvent(msgspec.Struct, frozen=True, array_like=True):
    kind: str


class _SpelledBatch(msgspec.Struct, frozen=True):
    seq: int
    ts: int
    events: list[msgspec.Raw]


class _SpelledEvent(msgspec.Struct, frozen=True, rename={"kind": "type"}):
    kind: str


class NativeCodec:
    """Encodes batches: in msgpack like `events.codec.encode_batch`, or in JSON like `to_json`.

    `key_bytes`: size of a key.
    """

    def __init__(self, encoding: Encoding, key_bytes: int) -> None:
        self._key_bytes = key_bytes
        self._format: Any = msgspec.msgpack if encoding == "msgpack" else msgspec.json
        batch, event = (
            (_PackedBatch, _PackedEvent) if encoding == "msgpack" else (_SpelledBatch, _SpelledEvent)
        )
        self._decode, self._event = self._format.Decoder(batch).decode, self._format.Decoder(event).decode

    def encode(self, batch: EventBatch) -> bytes:
        """Encode one message."""
        return encode_batch(batch) if self._format is msgspec.msgpack else to_json(batch, self._key_bytes)

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """Join consecutive messages into one, with the number and the time of the last one.

        It begins with the last state, or gap, in them, if there is one.
        """
        if len(payloads) == 1:
            return payloads[0]
        batches = [self._decode(payload) for payload in payloads]
        kinds = [self._event(each.events[0]).kind if each.events else "" for each in batches]
        first = max((at for at, kind in enumerate(kinds) if kind in _BEGINNINGS), default=0)
        events = [event for batch in batches[first:] for event in batch.events]
        joined: bytes = self._format.encode(msgspec.structs.replace(batches[-1], events=events))
        return joined


def decode_native(payload: bytes) -> EventBatch:
    """Decode the batch of a message in msgpack. Raises EventDecodeError."""
    if payload[:1] == _JSON_BEGINS:
        raise EventDecodeError("it is JSON: readers of this software require format=native")
    return decode_batch(payload)


def origin_of_state(batch: EventBatch) -> Origin | None:
    """Return the origin of a whole state in the batch; None: it has none, so that a reader cannot begin with it."""
    first = batch.events[0] if batch.events else None
    return Origin(first.log_id, first.epoch) if isinstance(first, EpochStarted) else None


def has_unhealed_gap(batch: EventBatch, last_seq: int) -> bool:
    """Return True if the stream itself lacks batches after `last_seq`, and this one does not have the state."""
    lost = False
    for event in batch.events:
        if isinstance(event, StateExported):
            lost = False
        elif isinstance(event, Gap) and event.last_seq > last_seq:
            lost = True
    return lost
