"""What of a group of frames is stored in another way: columns of small numbers, and keys that follow from tokens.

Whatever is found here, or is not, a group is expanded to the same bytes; only its size depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from events.codec import decode_batch
from events.errors import EventDecodeError
from events.log.groups import KEY_BYTES, Piece, keys_behind
from events.packed import SLOT_BYTES, TOKEN_BYTES, column_fields
from events.types import BlocksStored, EncoderAdded, EventBatch, SequenceAdded

_LEAST_BYTES = 64
"""Shorter columns are not worth telling where they are."""
_LOOKED_AT = 16
_MAX_BLOCK_BYTES = 1 << 20


class _Tokens(NamedTuple):
    """Where a sequence's tokens are."""

    begin: int
    column: bytes


class Columns:
    """Finds them, in one group after another of a log."""

    def __init__(self) -> None:
        self._block = 0
        """Bytes of a block's tokens, once they are known."""

    def of(self, data: bytes, payloads: list[tuple[int, int]]) -> list[Piece]:
        """Those of a group, in order; `payloads`: where its frames' payloads begin and end."""
        pieces, tokens = list[Piece](), dict[int, _Tokens]()
        for place, end in payloads:
            batch, begin = _decoded(data[place:end]), place
            for owner, column in (
                [each for event in batch.events for each in _columns(event)] if batch else ()
            ):
                at = data.find(column, begin, end)
                if at < 0:
                    continue  # It stands elsewhere in its event than it does in the struct.
                begin = at + len(column)
                if isinstance(owner, SequenceAdded | EncoderAdded) and column is owner.tokens:
                    tokens[owner.handle] = _Tokens(at, column)
                if isinstance(owner, BlocksStored) and column is owner.keys:
                    pieces += self._keys(at, owner, tokens.get(owner.handle))
                elif _are_small(column):
                    pieces.append(Piece(at, len(column)))
        return pieces

    def _keys(self, at: int, event: BlocksStored, tokens: _Tokens | None) -> Iterator[Piece]:
        """All keys of a column but the first, if they are what follows from that one and the sequence's tokens."""
        count = len(event.keys) // KEY_BYTES
        if tokens is None or count < 2 or len(event.keys) % KEY_BYTES:
            return
        second = event.first_block + len(event.slots) // SLOT_BYTES - count + 1
        block = self._block or self._block_bytes(event.keys, second, tokens.column)
        # What was generated is not among the tokens of a prompt.
        known = min(count - 1, len(tokens.column) // block - second) if block and second > 0 else 0
        if known < 1:
            return
        begin, size = second * block, known * block
        following = keys_behind(event.keys[:KEY_BYTES], tokens.column[begin : begin + size], block)
        if following == event.keys[KEY_BYTES : (1 + known) * KEY_BYTES]:
            self._block = block
            yield Piece(at + KEY_BYTES, known * KEY_BYTES, tokens.begin + begin, block)

    def _block_bytes(self, keys: bytes, second: int, column: bytes) -> int:
        """With blocks of how many bytes the second key follows from the first; 0: of none."""
        block = TOKEN_BYTES
        while block <= min(_MAX_BLOCK_BYTES, len(column)):
            tokens = column[second * block : (second + 1) * block]
            follows = keys_behind(keys[:KEY_BYTES], tokens, block) if len(tokens) == block else b""
            if follows == keys[KEY_BYTES : 2 * KEY_BYTES]:
                return block
            block *= 2
        return 0


def _decoded(payload: bytes) -> EventBatch | None:
    try:
        return decode_batch(payload) if payload else None
    except EventDecodeError:
        return None


def _columns(owner: Struct) -> Iterator[tuple[Struct, bytes]]:
    """The columns of a struct, and of those in it, with whose they are, as far as they are long."""
    columns, rows = column_fields(type(owner))
    for name, _ in columns:
        column = getattr(owner, name)
        if len(column) >= _LEAST_BYTES:
            yield owner, column
    for name, size in rows:
        for each in () if size else getattr(owner, name):
            yield from _columns(each)


def _are_small(column: bytes) -> bool:
    """Whether these look like 32-bit numbers, of which the fourth bytes are alike."""
    return not len(column) % TOKEN_BYTES and len(set(column[3 : _LOOKED_AT * TOKEN_BYTES : TOKEN_BYTES])) < 3
