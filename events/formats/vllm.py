"""The wire format of vLLM's KV events: what most KV-aware routers read.

A message has three frames: topic, number (8 bytes, big-endian), batch. Numbers count the batches of one publisher;
who misses some asks its replay socket (a ROUTER, so ask with a DEALER) with an empty frame and the first number
wanted, and is sent ``"", topic, number, batch`` for each batch from there on, then an end marker with the number -1
and an empty batch. Until vLLM 0.25 answers had no topic; `parse_answer` reads both.

Batches are written by `encode_batch` from the changes of an `events.feed.fold.Feed`, and read by `decode_batch`, which
knows more forms than `encode_batch` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from events.errors import EventDecodeError
from events.formats.vllm_decode import AllBlocksCleared as AllBlocksCleared
from events.formats.vllm_decode import BlockRemoved as BlockRemoved
from events.formats.vllm_decode import BlockStored as BlockStored
from events.formats.vllm_decode import Hash as Hash
from events.formats.vllm_decode import Unknown as Unknown
from events.formats.vllm_decode import VLLMBatch as VLLMBatch
from events.formats.vllm_decode import VLLMEvent as VLLMEvent
from events.formats.vllm_decode import decode_batch as decode_batch
from events.formats.vllm_encode import MEDIA as MEDIA
from events.formats.vllm_encode import adapter_name as adapter_name
from events.formats.vllm_encode import encode_batch as encode_batch
from events.formats.vllm_encode import join_batches as join_batches

SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
"""The number of the end marker; its batch is empty."""


class Message(NamedTuple):
    """The frames of one message."""

    topic: bytes
    seq: int
    payload: bytes


def encode_seq(seq: int) -> bytes:
    """A number as a frame."""
    return seq.to_bytes(SEQ_BYTES, "big")


def decode_seq(frame: bytes) -> int:
    """A frame as a number; raises EventDecodeError if it has not 8 bytes."""
    if len(frame) != SEQ_BYTES:
        raise EventDecodeError(f"a message number has {len(frame)} bytes, not {SEQ_BYTES}")
    return int.from_bytes(frame, "big")


def parse_message(frames: Sequence[bytes]) -> Message:
    """What a SUB socket received; raises EventDecodeError."""
    if len(frames) != 3:
        raise EventDecodeError(f"a message has {len(frames)} frames, not 3")
    return _message(*frames)


def replay_request(start: int) -> list[bytes]:
    """What a DEALER socket sends for all batches from `start` on."""
    return [b"", encode_seq(start)]


def parse_answer(frames: Sequence[bytes]) -> Message | None:
    """What a DEALER socket received; None is the end of the replay. Raises EventDecodeError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise EventDecodeError("an answer has 4 frames, or 3, of which the first one is empty")
    topic = frames[1] if len(frames) == 4 else b""
    seq, payload = frames[-2:]
    # The empty batch is the sign: no real one is, whatever its number.
    return _message(topic, seq, payload) if payload else None


def _message(topic: bytes, seq: bytes, payload: bytes) -> Message:
    if seq == END_OF_REPLAY:
        raise EventDecodeError("a batch has the number of the end marker")
    return Message(topic, decode_seq(seq), payload)
