"""The base of all events, and the structs inside them: namespaces, pools, groups, and the exported state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from events.ids import GroupIndex, Handle, LevelIndex
from events.packed import Checksums, Counts, Handles, Keys, Numbers, Slots, Tokens

RequestId = str | int
LEVEL_NAMES = ("primary", "secondary")
"""Names of the levels, by number."""


@dataclass(frozen=True)
class Spelled:
    """Marks a field with a JSON form other than its type's."""

    form: Literal["level", "json", "tokens", "hash", "fields", "rare"]
    """``rare``: nearly always None, and omitted then; in bytes also, at the end of an event."""


Level = Annotated[LevelIndex, Spelled("level")]
"""A level; in JSON by its name."""
JsonText = Annotated[str, Spelled("json")]
"""A JSON object as text; in JSON the object."""


Session = Annotated[str | None, Spelled("rare")]
Lookup = Annotated[bool | None, Spelled("rare")]
Labels = Annotated[dict[str, str] | None, Spelled("rare")]


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all events."""


class EventPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of the structs inside events."""


class Namespace(EventPart, frozen=True, cache_hash=True):
    """Blocks are shared only inside one namespace. The salt appears as its SHA-256 digest only."""

    lora_id: int | None = None
    lora_name: str | None = None
    salt_digest: bytes | None = None
    uses_extra_ids: bool = False
    """True if the request gives its tokens extra ids, even if all are 0 (as in TensorRT-LLM, that is part of
    equality)."""


class StatedRange(EventPart, frozen=True):
    """Retention of the blocks that begin with a prompt's tokens from `start` up to `stop`."""

    start: int
    stop: int | None
    """End of the range; None: the end of the prompt."""
    priority: int
    duration: int = 0
    """Nanoseconds after a block's last release; 0: unlimited."""


class StatedRetention(EventPart, frozen=True):
    """Retention of a request's blocks."""

    ranges: tuple[StatedRange, ...]
    """Ranges of the prompt, by `start`; they do not overlap."""
    priority: int
    """Priority of blocks that begin with a sampled token."""
    duration: int = 0
    """Duration for these; in nanoseconds, 0: unlimited."""


class Inherited(EventPart, frozen=True):
    """Retention of an uncached block if its request states none: that of the block it was copied from."""

    group: GroupIndex
    block: int
    """Index of the block in the table."""
    priority: int
    duration: int


class PoolCreated(EventPart, frozen=True):
    """One tensor per level: the blocks' data of the layers that share a number of KV heads."""

    num_kv_heads: int
    layers: tuple[int, ...]
    bytes_per_block: int


class GroupCreated(EventPart, frozen=True, cache_hash=True):
    """One attention window: its layers, its pools, and its blocks per level."""

    window: int
    """Tokens; at most the capacity of its primary blocks. 0: cross attention, which has none."""
    kind: str
    """``full``: its layers attend to all of the longest sequence; ``sliding``: only to the last `window` tokens;
    ``cross``: to the encoder's input. The last group is the only one that may be of this kind."""
    layers: tuple[int, ...]
    pools: tuple[PoolCreated, ...]
    num_blocks: tuple[int, int]


class SymbolPage(EventPart, frozen=True):
    """256 consecutive symbols: a token of an item at 256 offsets, or 256 consecutive tokens with one extra id.

    The symbol at `index` of page `number` is ``-1 - 256 * number - index``.
    """

    number: int
    token: int
    """Token of the page: in an item, the one at all these offsets; else the first of the tokens, a multiple of 256."""
    extra_id: int = 0
    digest: bytes | None = None
    """The item's digest; None: in no item."""
    offset: int = 0
    """Offset of the page in its item, a multiple of 256; 0 outside items."""
    uuid: str | None = None
    """The item's other name, if it had one when the page was begun."""


Pages = Annotated[tuple[SymbolPage, ...], Spelled("tokens")]
"""Pages of symbols; none if tokens are omitted, in JSON null then."""


RUN_COLUMNS = 10
"""Numbers per run in `GroupExported.runs`."""
BLOCK_COLUMNS = 7
"""Numbers per block in `GroupExported.blocks`."""


class GroupExported(EventPart, frozen=True):
    """The cached blocks of one group as columns over runs, parents before children."""

    namespaces: tuple[Namespace, ...]
    runs: Numbers
    """int64, 10 per run: parent (index of a run, or -1 - index of the namespace), blocks, tokens of the last block,
    level, priority, duration, expiry, release stamp, references, transfer. In a sliding window the last seven, which
    differ from block to block there, are 0."""
    symbols: Tokens
    """The tokens of all runs, in order; empty if the log records no tokens."""
    slots: Slots
    """Slots of all blocks of the runs, in order; in a sliding window -1 for a block that is not cached but has a
    cached descendant."""
    keys: Keys
    blank_slots: tuple[Slots, Slots]
    """Blank slots per level; the last is taken next."""
    shared: Numbers
    """int64, 2 per entry: a primary slot that is not cached, and the number (>= 2) of sequences that hold it."""
    blocks: Numbers = b""
    """Sliding windows only. int64, 7 per block of the runs: level, priority, duration, expiry, release stamp,
    references, transfer."""
    uses: Numbers = b""
    """Use counts, only in a full window with `eviction_policy` ``levels``: int64. One per run: the releases by which
    its turn is delayed; then the turn of the block last evicted for good; then 2 per block, cached or not: name and
    uses, least recently used first."""
    checksums: Checksums = b""
    """One per secondary slot, for landed blocks; 0 elsewhere. Empty if none is known."""


class SequenceExported(EventPart, frozen=True):
    """A running sequence, or an encoder input that running sequences read."""

    handle: Handle
    request_id: RequestId
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    num_prompt_tokens: int
    computed: int
    stored: tuple[int, ...]
    """Per group, the number of leading blocks that are cached, or were when the window passed them."""
    slots: tuple[Slots, ...]
    """Per group; -2 for a block that the window has passed. With `append_only_tables`, if the sequence has kept slots
    that were replaced in its table, these follow, per group, the last ones first."""
    keys: Keys
    """Keys of its leading blocks, if events have given them."""
    retention: StatedRetention | None = None
    inherited: tuple[Inherited, ...] = ()
    encoder: int = 0
    """The handle of the encoder input that it reads, which is another entry; 0: none."""


class PinExported(EventPart, frozen=True):
    """Blocks that are held in addition to those of running sequences."""

    pin: int
    request_id: RequestId
    """The request that had the blocks."""
    named: bool
    """True if they are still cached."""
    slots: tuple[Slots, ...]
    """Per group, in primary, shallowest first."""


class TransferExported(EventPart, frozen=True):
    """A copy that has not landed yet."""

    transfer: int
    group: GroupIndex
    level: Level
    slots: Slots
    handle: Handle | None
    """The sequence that it is made for; None: it only frees slots."""


class SharingGroup(EventPart, frozen=True):
    """A further group of layers: its part of the first group's pool, or a pool of its own."""

    kind: str
    """The parts of a prefix of p tokens that must be named so that the group can continue after it. ``full``: all of
    its blocks; ``sliding``: those of the last `window` tokens; ``chunked``: those from the last multiple of `window`
    on; ``state``: position p; ``uncached``: nothing, its slots are never found."""
    tokens_per_block: int
    window: int = 0
    layers: int = 0
    """Number of layers."""
    named: Slots = b""
    """Slots, one per name."""
    keys: Keys = b""
    positions: Counts = b""
    handles: Handles = b""
    """Sequences, one per entry of a table."""
    indices: Counts = b""
    slots: Slots = b""
    blocks: int = 0
    """Slots of a pool of its own, numbered on from those of the first group's primary pool and of the groups before; 0:
    it takes slots of that pool."""
