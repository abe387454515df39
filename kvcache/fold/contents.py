"""What a cache state is made of. Changed only while `CacheState.apply` applies an event."""

from __future__ import annotations

from array import array

from events import types as ev
from events.ids import GroupIndex, Handle, LevelIndex
from events.packed import TOKEN_BYTES
from events.tokens.names import ALGORITHMS, HashAlgorithm
from events.tokens.sequences import RunningTokens
from events.tokens.symbols import SymbolTable, pages_in, rich_end
from events.types import SLIDING, Namespace, RequestId
from kvcache.errors import invariant
from kvcache.fold.counting_group import CountingGroup
from kvcache.fold.group_state import GroupState
from kvcache.fold.pin import Pin
from kvcache.fold.positional import PositionalGroup
from kvcache.fold.prefix_tree import Node
from kvcache.fold.sequence import Sequence, decode_on
from kvcache.fold.shape import counts_uses
from kvcache.fold.sliding_group import SlidingGroup

AnyGroup = GroupState | SlidingGroup


class Transfer:
    """A copy whose landing is not yet known."""

    __slots__ = ("group", "handle", "level", "slots")

    def __init__(
        self, group: GroupIndex, level: LevelIndex, slots: array[int], handle: Handle | None
    ) -> None:
        self.group = group
        self.level = level
        self.slots = slots
        self.handle = handle
        """The sequence that it is made for; None: it only makes room."""


class Contents:
    """Blocks per attention window, running sequences, copies on their way, symbols, and the counters of all numbers."""

    def __init__(self, *, tokens_recorded: bool = True) -> None:
        self.tokens_recorded = tokens_recorded
        """False: a log without tokens; blocks are then matched by their keys."""
        self.epoch = 0
        self.created: ev.CacheCreated | None = None
        self.groups: list[AnyGroup] = []
        self.positional: list[PositionalGroup] = []
        """Further groups, which have slots in the pool of the first one."""
        self.hashing: HashAlgorithm = ALGORITHMS["none"]
        self.tokens_per_block = 1
        self.longest = self.longest_input = 0
        """Tokens that a sequence, and an encoder's input, can have at most."""
        self.sequences: dict[int, Sequence] = {}
        """By handle; encoders' inputs, too."""
        self.handles: dict[RequestId, int] = {}
        self.running = RunningTokens(self.sequences, decode_on)
        self.symbols = SymbolTable()
        self.rich: dict[int, int] = {}
        """Sequences with symbols below 0, by handle: how many tokens there are up to the last one."""
        self.transfers: dict[int, Transfer] = {}
        self.awaiting_onboard: dict[int, list[tuple[Sequence, dict[int, int]]]] = {}
        """By group, sequences that claimed secondary blocks still to be onboarded, and by slot the blocks' places in
        the table: none between two commands."""
        self.refused: dict[RequestId, None] = {}
        """Requests that did not fit and were not admitted since, oldest first."""
        self.next_handle = 1
        self.next_transfer = 1
        self.releases = 0
        """Raised by each release."""
        self.clock = 0
        """The last time that an event has told; 0 as long as nothing is kept for a time."""
        self.all_kept_alike = True
        """Whether no request that was ever admitted has blocks that are kept otherwise than by default."""
        self.pins: dict[int, Pin] = {}
        self.next_pin = 1
        self.changed_blocks = 0
        """Blocks stored, updated, moved and removed since the last checkpoint."""

    def tell_time(self, now: int) -> None:
        """An event tells the time, or 0."""
        if now:
            invariant(now >= self.clock, "time goes back")
            self.clock = now

    def root_key(self, namespace: Namespace) -> bytes:
        """The key that the first block of a prompt continues."""
        for group in self.groups:
            root = group.tree.roots.get(namespace)
            if root is not None:
                return root.key  # made once
        return self.hashing.root_key(namespace)

    def roots(self, namespace: Namespace) -> list[Node]:
        """Where the path of a new sequence begins in each group."""
        key = self.root_key(namespace)
        return [group.start(namespace, key) for group in self.groups]

    def make_group(self, index: int) -> AnyGroup:
        """The state of a window in which nothing is cached yet."""
        assert self.created is not None
        group, key_bytes, size = self.created.groups[index], self.created.key_bytes, self.tokens_per_block
        full = CountingGroup if counts_uses(self.created) else GroupState
        kind = SlidingGroup if group.kind == SLIDING else full
        block_bytes = size * TOKEN_BYTES if self.tokens_recorded else key_bytes
        return kind(index, group, size, block_bytes, key_bytes, tokens_recorded=self.tokens_recorded)

    def note_rich(self, handle: int, symbols: bytes) -> None:
        """Note how far a prompt has symbols below 0, so that nobody has to look through a plain one."""
        if self.symbols.pages and (end := rich_end(symbols)):
            self.rich[handle] = end

    def tokens_of(self, num_tokens: int, recorded: bytes, longest: int) -> array[int]:
        """A sequence's tokens as an event has them; zeros where the log records none."""
        # Checked before so much is made of so little: a log without tokens could claim any number of them.
        fits = 0 < num_tokens <= longest
        invariant(fits, "a sequence has more tokens than the cache can hold, or none")
        if not self.tokens_recorded:
            return array("i", bytes(TOKEN_BYTES * num_tokens))
        invariant(len(recorded) == TOKEN_BYTES * num_tokens, "a sequence has other tokens than it counts")
        return array("i", recorded)

    def set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The K/V of so many leading tokens is written."""
        self.running.forget_row()
        sequence.computed = num_tokens

    def used_pages(self) -> set[int]:
        """The pages whose symbols occur in cached blocks and running sequences; others may be forgotten."""
        used: set[int] = set()
        for group in self.groups:
            for run in group.tree.runs.values():
                used |= pages_in(run.symbols)
        for handle, end in self.rich.items():
            used |= pages_in(self.sequences[handle].tokens[:end].tobytes())
        return used
