"""Bytes that prove where they came from: a stand-in for K and V that can be checked.

A block may be reused only if its bytes are those that computing it again would give. Real K and V of
a token depend on the token and on everything before it, and differ by layer, head, and K or V. So does this
pattern: each row (the elements of one token, layer, head, K or V) is made from a digest of the namespace and of all
tokens up to and including this one, and from the row's coordinates. A block that holds the right tokens after another
prefix, the right block of another layer, or a copy that came too early fails the check.

The digest of a prefix is a sum of scrambled (token, position) pairs, hence one cumulative sum for a whole
sequence. Each word of a row is an odd multiple of (digest xor salt of the coordinates). Both steps are
bijections, so words of different digests or coordinates certainly differ if words have 64 bits, and differ except with
probability 2^-bits if rows are too short for such words.

Rows are written as integers. No floating-point operation touches them, so any dtype keeps them exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import InternalError, invariant
from kvcache.fold.survivors import LostPrefix
from kvcache.layout import ITEM_BYTES, PoolLayout
from kvcache.workload.tokens import Int32s, Int64s, Uint64s, mix64

if TYPE_CHECKING:
    import torch

    from kvcache.pools import Pools

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)
_CHUNK_BYTES = 32 * 2**20
"""Rows are made and compared in pieces of about this size, so that a long prompt of a large model fits."""
_WORD_TYPES = {8: "int64", 4: "int32", 2: "int16", 1: "uint8"}


@dataclass(eq=False, repr=False)
class PatternMismatch(InternalError):
    """A block does not hold the bytes that computing it would have produced.

    `request_id` got it, as block `block_index` of its table, in primary slot `slot`; `layer` is the first layer that
    differs.
    """

    request_id: str | int
    block_index: int
    slot: int
    layer: int
    text = (
        "request {request_id!r}: block {block_index} (primary slot {slot}) holds wrong bytes "
        "in layer {layer}: it was never filled, was overwritten, or belongs to another prefix"
    )


@dataclass(frozen=True, slots=True)
class PatternSpan:
    """Consecutive tokens of one sequence."""

    tables: tuple[Int32s, ...]
    """Primary slots of the sequence's blocks, one table per group; negative for blocks that a window has released."""
    digests: Uint64s
    """One digest per token of the whole sequence (see `prefix_digests`)."""
    begin: int
    end: int


def prefix_digests(tokens: Int32s, namespace: Sequence[int | str | None] = ()) -> Uint64s:
    """Return one number per token that stands for the namespace and all tokens up to this one; shape [n]."""
    name = blake2b(repr(tuple(namespace)).encode(), digest_size=8).digest()
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64) << np.uint64(32)
    sums = np.cumsum(mix64(places | tokens.view(np.uint32)), dtype=np.uint64)
    return mix64(sums ^ np.frombuffer(name, dtype="<u8"))


class PoolPattern:
    """Writer and checker of the pattern in primary pools. All tensors are accessed in place."""

    def __init__(self, pools: Pools) -> None:
        self._groups = tuple(
            tuple(_PatternedPool(pool.layout, pool.primary) for pool in group) for group in pools.groups
        )
        self._windows = tuple(group.window for group in pools.layout.groups)
        self._block = pools.layout.tokens_per_block

    def write(self, spans: Sequence[PatternSpan]) -> None:
        """Fill the rows of all tokens of the spans."""
        if not spans:
            return
        digests = np.concatenate([span.digests[span.begin : span.end] for span in spans])
        for group, pools in enumerate(self._groups):
            for pool in pools:
                places = [pool.places(span.tables[group], span.begin, span.end) for span in spans]
                slots, offsets = (np.concatenate(column) for column in zip(*places, strict=True))
                pool.write(slots, offsets, digests)

    def recompute(self, lost: LostPrefix) -> bool:
        """Fill the rows of lost blocks, as `KVCacheManager.open` requires; of a salt only the digest is known."""
        name = lost.namespace
        if name.salt_digest is None:
            digests = prefix_digests(lost.tokens, (name.lora_id, name.lora_name, None))
            self.write([PatternSpan((lost.slots,), digests, lost.first_token, len(lost.tokens))])
        return name.salt_digest is None

    def check(self, request_id: str | int, span: PatternSpan) -> int:
        """Compare the rows of a span, in each window without the blocks that it has released.

        Returns the number of blocks compared, over all groups. Raises PatternMismatch for the first block that differs,
        and InvariantViolated if the token after the span would attend to a block that is gone.
        """
        blocks = 0
        for group, table in enumerate(span.tables):
            begin = self._first_kept(group, span)
            for pool in self._groups[group]:
                slots, offsets = pool.places(table, begin, span.end)
                wrong = pool.first_difference(slots, offsets, span.digests[begin : span.end])
                if wrong is not None:
                    token, layer = wrong
                    raise PatternMismatch(
                        request_id, (begin + token) // self._block, int(slots[token]), layer
                    )
            blocks += -(-span.end // self._block) - begin // self._block
        return blocks

    def _first_kept(self, group: int, span: PatternSpan) -> int:
        """Return the first token of a span in a block that the window still has."""
        table = span.tables[group]
        gone = int(np.argmax(table >= 0))
        begin = max(span.begin, gone * self._block)
        seen = max(span.begin, span.end - self._windows[group] + 1)
        invariant(begin <= seen, "a window has released a block that it attends to")
        return begin


class _PatternedPool:
    """One pool's tensor as rows of machine words: [block, layer, K or V, token, head, word] for both layouts."""

    def __init__(self, layout: PoolLayout, tensor: torch.Tensor) -> None:
        import torch  # here, so that playing a trace without pools needs no torch

        self._from_numpy = torch.from_numpy
        self.block = layout.tokens_per_block
        self._layers = layout.layers
        row_bytes = layout.head_dim * ITEM_BYTES[layout.dtype]
        word_bytes = next(size for size in _WORD_TYPES if row_bytes % size == 0)
        self._word = np.dtype(_WORD_TYPES[word_bytes])
        words = tensor.view(getattr(torch, self._word.name))
        # A view, not a copy: writing to it writes to the pool.
        self._rows = words.transpose(3, 4) if layout.kv_layout == "HND" else words
        self._salts = _salts(layout, row_bytes // word_bytes)
        self._chunk = max(1, _CHUNK_BYTES // (self._salts.size * word_bytes))

    def places(self, table: Int32s, begin: int, end: int) -> tuple[Int64s, Int64s]:
        """Return slot and offset in the block of the tokens begin..end of a sequence; shape [end - begin] each."""
        positions = np.arange(begin, end)
        slots = table[positions // self.block].astype(np.int64)
        # Torch would index from the end with a negative one.
        invariant(not len(slots) or int(slots.min()) >= 0, "a block table names a slot below 0")
        return slots, positions % self.block

    def write(self, slots: Int64s, offsets: Int64s, digests: Uint64s) -> None:
        """Fill the rows of the tokens at these places."""
        for part in self._parts(len(slots)):
            values = self._from_numpy(self._expected(digests[part])).to(self._rows.device)
            self._rows[self._index(slots[part], offsets[part])] = values

    def first_difference(self, slots: Int64s, offsets: Int64s, digests: Uint64s) -> tuple[int, int] | None:
        """Return (index of the token, layer) of the first row that differs, or None."""
        for part in self._parts(len(slots)):
            actual = self._rows[self._index(slots[part], offsets[part])].cpu().numpy()
            different = (actual != self._expected(digests[part])).any(axis=(2, 3, 4))
            if different.any():
                token, layer = np.argwhere(different)[0]
                return part.start + int(token), self._layers[int(layer)]
        return None

    def _index(self, slots: Int64s, offsets: Int64s) -> Any:
        own_slots, own_offsets = (self._from_numpy(each).to(self._rows.device) for each in (slots, offsets))
        return own_slots, slice(None), slice(None), own_offsets

    def _parts(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self._chunk):
            yield slice(start, min(start + self._chunk, count))

    def _expected(self, digests: Uint64s) -> npt.NDArray[Any]:
        """Return the rows of tokens with these digests; shape [n, layers, kv_factor, heads, words]."""
        words = digests.reshape(-1, 1, 1, 1, 1) ^ self._salts
        words *= _MULTIPLIER
        return words.astype(self._word)


def _salts(layout: PoolLayout, words: int) -> Uint64s:
    """Return a number per (layer, K or V, head, word), all different; shape [layers, kv_factor, heads, words]."""
    kept = range(layout.kv_factor)
    coordinates = itertools.product(layout.layers, kept, range(layout.num_kv_heads), range(words))
    packed = [layer << 40 | kv << 32 | head << 16 | word for layer, kv, head, word in coordinates]
    shape = (len(layout.layers), layout.kv_factor, layout.num_kv_heads, words)
    return mix64(np.array(packed, dtype=np.uint64)).reshape(shape)
