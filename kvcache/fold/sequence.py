"""Holders of blocks: running requests (tokens, block tables, computed and cached counts), pins and copies."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from events.ids import GroupIndex, Handle, LevelIndex
from events.tokens.sequences import SequenceTokens
from events.types import Inherited, Namespace, RequestId, StatedRetention
from kvcache.fold.prefix_tree import Node, Run

DEFAULT_PRIORITY = 35
PRIORITY_MAX = 100
"""Highest priority; 0 is evicted first."""
_FOLLOWS = -1
ONBOARDING = -1
"""Block table entry, within one call: a cached block that is about to be onboarded."""
DETACHED = -2
"""Block table entry: a block that the window has left. Nothing may be read or written there."""


class Sequence(SequenceTokens):
    """State of one sequence; changed only while an event is applied."""

    def __init__(
        self,
        handle: Handle,
        request_id: RequestId,
        namespace: Namespace,
        tokens: array[int],
        roots: list[Node],
    ) -> None:
        super().__init__(tokens)
        self.handle = handle
        self.request_id = request_id
        self.namespace = namespace
        self._computed = 0
        """`_FOLLOWS` while it decodes: set once, which is cheaper than counting with every token."""
        self.num_prompt_tokens = len(tokens)
        self.tables = [array("i") for _ in roots]
        """Per group: the primary slot of each block, or DETACHED."""
        self.detached = [0] * len(roots)
        """Per group: leading blocks that a sliding window has left, or never needed."""
        self.path_ends = roots
        """Per group: the end of the cached path that the sequence holds. Its blocks up to there are cached, except
        those that a sliding window has left."""
        self.replaced: tuple[array[int], ...] = ()
        """Per group: slots that left its table for others with the same content, and stay its own until it ends
        (`append_only_tables`), the last ones first. Empty: there are none in any group."""
        self.retention: StatedRetention | None = None
        """Stated retention; None: all its blocks have the default priority, for good."""
        self.inherited: tuple[Inherited, ...] = ()
        """Retention inherited by blocks that are not cached yet and were copied from ones with another priority or
        duration."""
        self.encoder: Sequence | None = None
        """The encoder's input that it reads: a sequence with blocks for cross attention only, where this one has none.
        """
        self.holders = 0
        """Running sequences that read this encoder's input."""
        self.keys = bytearray()
        """Keys of its leading blocks, up to the last that any group has needed: made once, recorded once."""

    def branch(self, handle: Handle, request_id: RequestId, blocks: int) -> Sequence:
        """Create another sequence with the same tokens and the same first `blocks` blocks."""
        child = Sequence(handle, request_id, self.namespace, self.copy_tokens(), self.path_ends[:])
        child.computed, child.num_prompt_tokens = self.computed, self.num_prompt_tokens
        child.retention, child.inherited = self.retention, self.inherited
        child.tables, child.detached = [table[:blocks] for table in self.tables], self.detached[:]
        child.keys = self.keys[:]
        child.encoder = self.encoder
        return child

    @property
    def computed(self) -> int:
        """Leading tokens with written K/V: while it decodes, all but the last sampled one."""
        computed = self._computed
        return computed if computed >= 0 else self.num_tokens - 1

    @computed.setter
    def computed(self, num_tokens: int) -> None:
        self._computed = num_tokens

    @property
    def num_next(self) -> int:
        """Tokens up to and including the next one to be computed."""
        computed, num_tokens = self._computed, self.num_tokens
        return num_tokens if computed < 0 or computed >= num_tokens else computed + 1

    @property
    def is_decoding(self) -> bool:
        """True if all tokens but the last sampled one count as computed, regardless of their number."""
        return self._computed == _FOLLOWS

    @property
    def stored(self) -> tuple[int, ...]:
        """Per group: leading blocks that are cached."""
        if len(self.path_ends) == 1:
            return (self.path_ends[0].end,)
        return tuple([tail.end for tail in self.path_ends])

    @property
    def stored_blocks(self) -> int:
        """Leading blocks that are cached, in the window with the fewest."""
        if len(self.path_ends) == 1:
            return self.path_ends[0].end
        ends = [tail.end for tail in self.path_ends]
        if self.encoder is not None:
            ends.pop()  # cross attention, of which it has none
        return ends[-1] if self.holders else min(ends)

    def keep(self, group: int, slots: array[int]) -> None:
        """Keep slots that others have replaced in the table of a group, until the sequence ends."""
        kept = self.replaced or tuple([array("i") for _ in self.tables])
        self.replaced = (*kept[:group], slots + kept[group], *kept[group + 1 :])

    def retention_in(self, group: int) -> array[int]:
        """Return the slots that others have replaced in the table of a group."""
        return self.replaced[group] if self.replaced else array("i")

    def part_in(self, group: int) -> Sequence:
        """Return the sequence with the blocks read in a group: this one, or for cross attention the encoder's input."""
        return self if self.tables[group] or self.encoder is None else self.encoder


@dataclass(slots=True)
class Pin:
    """References that outlive the sequence they were taken for."""

    request_id: RequestId
    slots: list[array[int]]
    """Per group: primary slots, shallowest first."""
    ends: list[Run | None]
    """Per group: with full attention, the run at the end of the pinned path."""
    named: bool = True
    """True while the blocks are cached; after the cache was cleared they are only held."""


@dataclass(slots=True)
class Transfer:
    """A copy that has not landed."""

    group: GroupIndex
    level: LevelIndex
    slots: array[int]
    handle: Handle | None
    """The sequence it is made for; None: it only frees slots."""


def packed_handles(sequences: Items[Sequence]) -> bytes:
    """Pack handles as a column of an event."""
    return array("q", [each.handle for each in sequences]).tobytes()


def is_steady(sequences: Items[Sequence], tokens_per_block: int) -> bool:
    """True if the next token of each of these is appended as usual: all before it count as computed, and have exactly
    the slots that they need.
    """
    return all(
        each.computed >= each.num_tokens - 1
        and len(each.tables[0]) == -(-each.num_tokens // tokens_per_block)
        for each in not_decoding(sequences)
    )


def not_decoding(sequences: Items[Sequence]) -> list[Sequence]:
    """Select the sequences with a counted number of computed tokens."""
    return [each for each in sequences if each._computed != _FOLLOWS]


def decode_on(sequences: Items[Sequence]) -> None:
    """Count all tokens of these but the last sampled one as computed from here on."""
    for each in not_decoding(sequences):
        each.computed = _FOLLOWS


class BlockRetention(NamedTuple):
    """Retention of a block: as its request states for its first token or, where nothing is stated, as of its copy
    source.
    """

    priority: int
    duration: int
    """Duration of the priority in nanoseconds from the release by the last sequence; 0: for good."""


DEFAULT = BlockRetention(DEFAULT_PRIORITY, 0)


def retention_of(sequence: Sequence, group: int, block: int, size: int) -> BlockRetention:
    """Return the retention that a block of a sequence is stored with."""
    retention, start = sequence.retention, block * size
    if retention is not None:
        if start >= sequence.num_prompt_tokens:
            return BlockRetention(retention.priority, retention.duration)
        for stated in retention.ranges:
            if stated.start <= start and (stated.stop is None or start < stated.stop):
                return BlockRetention(stated.priority, stated.duration)
    for copied in sequence.inherited:
        if (copied.group, copied.block) == (group, block):
            return BlockRetention(copied.priority, copied.duration)
    return DEFAULT


def rows(
    sequence: Sequence, group: int, first: int, last: int, size: int
) -> Iterator[tuple[int, int, BlockRetention]]:
    """Yield consecutive blocks with the same retention: first, end, retention."""
    begin, how = first, retention_of(sequence, group, first, size)
    for cut in _cuts(sequence, size):
        if begin < cut < last:
            beyond = retention_of(sequence, group, cut, size)
            if beyond != how:
                yield begin, cut, how
                begin, how = cut, beyond
    yield begin, last, how


def _cuts(sequence: Sequence, size: int) -> list[int]:
    """Return the blocks before which the stated retention may change, ascending."""
    cuts = {-(-sequence.num_prompt_tokens // size)}
    for stated in sequence.retention.ranges if sequence.retention is not None else ():
        cuts.add(-(-stated.start // size))
        cuts.add(-(-(stated.stop or 0) // size))
    for copied in sequence.inherited:
        cuts |= {copied.block, copied.block + 1}
    return sorted(cuts)
