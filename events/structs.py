"""What all events are, and the structs inside them: namespaces, what a cache is made of, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from events.ids import GroupIndex, Handle, LevelIndex
from events.packed import Checksums, Counts, Handles, Keys, Numbers, Slots, Tokens

RequestId = str | int
LEVEL_NAMES = ("primary", "secondary")
"""Of the levels, by number."""


@dataclass(frozen=True)
class Spelled:
    """Marks a field that JSON spells otherwise than its type says."""

    form: Literal["level", "json", "tokens", "hash", "fields", "rare"]
    """``rare``: nearly always None, and left out then; also of bytes, at the end of an event."""


Level = Annotated[LevelIndex, Spelled("level")]
"""A level; in JSON by its name."""
JsonText = Annotated[str, Spelled("json")]
"""A JSON object as text; in JSON the object."""


Session = Annotated[str | None, Spelled("rare")]
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
    """Whether the request gives its tokens extra ids, be they all 0 (as in TensorRT-LLM, that is part of equality)."""


class StatedRange(EventPart, frozen=True):
    """How the blocks are to be kept whose first token is one of a prompt's tokens from `start` up to `stop`."""

    start: int
    stop: int | None
    """None: up to the end."""
    priority: int
    duration: int = 0
    """In nanoseconds from when the last sequence lets go of a block; 0: for good."""


class StatedRetention(EventPart, frozen=True):
    """How the blocks of a request are to be kept."""

    ranges: tuple[StatedRange, ...]
    """Of the prompt, by `start`; they do not overlap."""
    priority: int
    """Of blocks that begin with a sampled token."""
    duration: int = 0
    """Likewise; in nanoseconds, 0: for good."""


class Inherited(EventPart, frozen=True):
    """How a block that is not cached yet is to be kept if its request does not say: as the one it was copied from."""

    group: GroupIndex
    block: int
    """Its index in the table."""
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
    """In tokens; at most what its primary blocks hold. 0: cross attention, which has none."""
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
    """In an item, the token at all these offsets; else the first of the tokens, a multiple of 256."""
    extra_id: int = 0
    digest: bytes | None = None
    """The item's; None: in no item."""
    offset: int = 0
    """In an item, the first of the offsets, a multiple of 256."""
    uuid: str | None = None
    """The item's other name, if it had one when the page was begun."""


Pages = Annotated[tuple[SymbolPage, ...], Spelled("tokens")]
"""Pages of symbols; none where tokens are left out, in JSON null then."""


RUN_COLUMNS = 10
"""Numbers per run in `GroupExported.runs`."""
BLOCK_COLUMNS = 7
"""Numbers per block in `GroupExported.blocks`."""


class GroupExported(EventPart, frozen=True):
    """The cached blocks of one group as columns over runs, parents before children."""

    namespaces: tuple[Namespace, ...]
    runs: Numbers
    """int64, 10 per run: parent (index of a run, or -1 - index of the namespace), blocks, tokens of the last
    block, level, priority, duration, expiry, release stamp, references, transfer. In a sliding window the last seven,
    which differ from block to block there, are 0."""
    symbols: Tokens
    """The tokens of all runs, in order; empty if the log records no tokens."""
    slots: Slots
    """In a sliding window -1 for a block that is not cached, while something behind it is."""
    keys: Keys
    blank_slots: tuple[Slots, Slots]
    """Blank slots per level; the next one to be taken is the last."""
    shared: Numbers
    """int64, 2 per entry: a primary slot that is not cached, and how many (>= 2) sequences hold it."""
    blocks: Numbers = b""
    """Sliding windows only. int64, 7 per block of the runs: level, priority, duration, expiry, release stamp,
    references, transfer."""
    uses: Numbers = b""
    """Only in a full window with `eviction_policy` ``levels``. int64. One per run, by how many releases its turn is put
    off; then the turn of the block that was evicted for good last; then 2 per block, cached or not: name and uses, what
    was used longest ago first."""
    checksums: Checksums = b""
    """One per secondary slot, of what has landed there; 0 elsewhere. Empty where none is known."""


class SequenceExported(EventPart, frozen=True):
    """One running sequence, or an encoder's input that running sequences read."""

    handle: Handle
    request_id: RequestId
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    num_prompt_tokens: int
    computed: int
    stored: tuple[int, ...]
    """Per group, the number of leading blocks that are cached, or were when the window left them behind."""
    slots: tuple[Slots, ...]
    """Per group; -2 for a block that the window has left behind."""
    keys: Keys
    """Of its leading blocks, as far as events have given them."""
    retention: StatedRetention | None = None
    inherited: tuple[Inherited, ...] = ()
    encoder: int = 0
    """The handle of the encoder's input that it reads, which is another entry; 0: none."""


class PinExported(EventPart, frozen=True):
    """Blocks that are held beside those of running sequences."""

    pin: int
    request_id: RequestId
    """Whose blocks they were."""
    named: bool
    """Whether they are still cached."""
    slots: tuple[Slots, ...]
    """Per group, in primary, shallowest first."""


class TransferExported(EventPart, frozen=True):
    """A copy whose landing is not yet known."""

    transfer: int
    group: GroupIndex
    level: Level
    slots: Slots
    handle: Handle | None
    """The sequence that it is made for; None: it only makes room."""


class SharingGroup(EventPart, frozen=True):
    """A group of layers without slots of its own, and what it has in the pool of the first group."""

    kind: str
    """What of a prefix of p tokens must be named so that the group can go on behind it. ``full``: all of its blocks;
    ``sliding``: those of the last `window` tokens; ``chunked``: those from the last multiple of `window` on; ``state``:
    position p; ``uncached``: nothing, nobody finds what it has."""
    tokens_per_block: int
    window: int = 0
    layers: int = 0
    """How many."""
    named: Slots = b""
    """Slots, one for each name."""
    keys: Keys = b""
    positions: Counts = b""
    handles: Handles = b""
    """Sequences, one for each entry of a table."""
    indices: Counts = b""
    slots: Slots = b""
