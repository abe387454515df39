"""The native format: each message is one batch of the cache's own events, whole, as msgpack or JSON.

A batch whose first event is `EpochStarted` tells the whole state, as the first batch of an epoch and a snapshot do:
what follows it continues from there, whatever was before. Whoever comes late, or has missed something, begins with one.
A batch without events is a heartbeat, and says which batch was the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from events.codec import decode_batch, encode_batch, to_json
from events.errors import EventDecodeError
from events.types import EpochStarted, EventBatch, Gap, StateExported

Encoding = Literal["msgpack", "json"]
_BEGINNINGS = ("EpochStarted", "Gap")
"""First events of batches that make those before them worthless."""
_JSON_BEGINS = b"{"


class Origin(NamedTuple):
    """Whose batches they are that are numbered together."""

    log_id: bytes
    epoch: int


class NativeCodec(Protocol):
    """Writes batches."""

    def encode(self, batch: EventBatch) -> bytes:
        """One message."""

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """One message for several that follow each other, which has the number and the time of the last one.

        It begins with the last state, or gap, that is in them, if there is one.
        """


class _PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    ts: int
    events: list[msgspec.Raw]


class _PackedKind(msgspec.Struct, frozen=True, array_like=True):
    name: str


class _SpelledBatch(msgspec.Struct, frozen=True):
    seq: int
    ts: int
    events: list[msgspec.Raw]


class _SpelledKind(msgspec.Struct, frozen=True):
    type: str


class PackedBatches:
    """In msgpack, as `events.codec.encode_batch` gives them."""

    _decode = staticmethod(msgspec.msgpack.Decoder(_PackedBatch).decode)
    _kind = staticmethod(msgspec.msgpack.Decoder(_PackedKind).decode)

    def encode(self, batch: EventBatch) -> bytes:
        """As `NativeCodec` says."""
        return encode_batch(batch)

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """As `NativeCodec` says."""
        if len(payloads) == 1:
            return payloads[0]
        batches = [self._decode(payload) for payload in payloads]
        first = _last_beginning([self._kind(each.events[0]).name if each.events else "" for each in batches])
        last, events = batches[-1], _events_of(batches[first:])
        return msgspec.msgpack.encode(_PackedBatch(last.seq, last.ts, events))


class SpelledBatches:
    """In JSON, as `events.codec.to_json` gives them; `key_bytes` are those of a key."""

    _decode = staticmethod(msgspec.json.Decoder(_SpelledBatch).decode)
    _kind = staticmethod(msgspec.json.Decoder(_SpelledKind).decode)

    def __init__(self, key_bytes: int) -> None:
        self._key_bytes = key_bytes

    def encode(self, batch: EventBatch) -> bytes:
        """As `NativeCodec` says."""
        return to_json(batch, self._key_bytes)

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """As `NativeCodec` says."""
        if len(payloads) == 1:
            return payloads[0]
        batches = [self._decode(payload) for payload in payloads]
        first = _last_beginning([self._kind(each.events[0]).type if each.events else "" for each in batches])
        last, events = batches[-1], _events_of(batches[first:])
        return msgspec.json.encode(_SpelledBatch(last.seq, last.ts, events))


def codec_of(encoding: Encoding, key_bytes: int) -> NativeCodec:
    """What writes batches in this encoding."""
    return PackedBatches() if encoding == "msgpack" else SpelledBatches(key_bytes)


def decode_native(payload: bytes) -> EventBatch:
    """The batch of a message in msgpack. Raises EventDecodeError."""
    if payload[:1] == _JSON_BEGINS:
        raise EventDecodeError("it is JSON: readers of this software take format=native")
    return decode_batch(payload)


def origin_told(batch: EventBatch) -> Origin | None:
    """Whose state the batch tells, all of it; None: it does not, so that one cannot begin with it."""
    first = batch.events[0] if batch.events else None
    return Origin(first.log_id, first.epoch) if isinstance(first, EpochStarted) else None


def loses_track(batch: EventBatch, last_seq: int) -> bool:
    """Whether batches after `last_seq` are missing in the stream itself, and the state does not follow in this one."""
    lost = False
    for event in batch.events:
        if isinstance(event, StateExported):
            lost = False
        elif isinstance(event, Gap) and event.last_seq > last_seq:
            lost = True
    return lost


def _last_beginning(kinds: Sequence[str]) -> int:
    return max((at for at, kind in enumerate(kinds) if kind in _BEGINNINGS), default=0)


def _events_of(batches: Sequence[Any]) -> list[msgspec.Raw]:
    return [event for batch in batches for event in batch.events]
