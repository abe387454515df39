"""What the states of all attention windows have in common: a prefix tree, slots per level, and who shares what."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from events.ids import GroupIndex, LevelIndex
from events.types import PRIMARY, SECONDARY, GroupCreated, Namespace
from kvcache.fold.prefix_tree import Node, PrefixTree, Root, Run
from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import Level
from kvcache.fold.watcher import Watcher


class CachedPart(NamedTuple):
    """Blocks of a run that are cached, in one level and with one priority."""

    begin: int
    end: int
    level: LevelIndex
    priority: int


def _ignore(expiry: int, number: int) -> None:
    """A replay decides nothing, so it need not know."""


class Group:
    """Blocks of one window: cached ones in the tree, the others blank or held by sequences."""

    __slots__ = (
        "index",
        "kind",
        "levels",
        "shared",
        "timed",
        "tokens_per_block",
        "tokens_recorded",
        "tree",
        "watcher",
        "window",
    )

    def __init__(
        self,
        index: int,
        created: GroupCreated,
        tokens_per_block: int,
        block_bytes: int,
        key_bytes: int,
        *,
        tokens_recorded: bool,
    ) -> None:
        self.index = GroupIndex(index)
        self.window, self.kind = created.window, created.kind
        self.tree = PrefixTree(block_bytes, key_bytes)
        primary, secondary = created.num_blocks
        self.levels = (Level(PRIMARY, primary), Level(SECONDARY, secondary))
        self.tokens_per_block = tokens_per_block
        self.tokens_recorded = tokens_recorded
        self.shared: dict[int, int] = {}
        """Primary slots without a name that several sequences hold (their blocks were cached once), and how many."""
        self.watcher = Watcher()
        self.timed: Callable[[int, int], None] = _ignore
        """Told of when something expires: a run's id, or a place in a sliding window."""

    def root(self, namespace: Namespace, key: bytes) -> Root:
        """The root of a namespace, made on first use."""
        root = self.tree.roots.get(namespace)
        if root is None:
            root = self.tree.roots[namespace] = Root(namespace, key)
        return root

    def content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytes:
        """What the tree keeps of the sequence's blocks from `first` up to `last`: tokens, or keys without them."""
        size, key_bytes = self.tokens_per_block, self.tree.key_bytes
        if self.tokens_recorded:
            return sequence.packed(first * size, (last - 1) * size + last_tokens)
        return bytes(sequence.keys[first * key_bytes : last * key_bytes])

    def new_content(self, sequence: Sequence, first: int, last: int, last_tokens: int) -> bytearray:
        """The same for the tree to keep: copied only once, as a prompt is too long for the processor's caches."""
        size, key_bytes = self.tokens_per_block, self.tree.key_bytes
        if self.tokens_recorded:
            return sequence.copied(first * size, (last - 1) * size + last_tokens)
        return sequence.keys[first * key_bytes : last * key_bytes]

    def keys_between(self, node: Node, begin: int, end: int) -> bytes:
        """The keys of the blocks from `begin` up to `end` on the path that ends in a node."""
        size = self.tree.key_bytes
        parts: list[bytearray] = []
        while isinstance(node, Run) and node.end > begin and begin < end:
            start = node.start
            parts.append(node.keys[max(begin - start, 0) * size : max(end - start, 0) * size])
            node = node.parent
        return b"".join(reversed(parts))

    def learn_keys(self, sequence: Sequence, node: Node, blocks: int) -> None:
        """Let a sequence know the keys of its first `blocks` blocks, which end in `node`."""
        size = self.tree.key_bytes
        if size and len(sequence.keys) < blocks * size:
            sequence.keys += self.keys_between(node, len(sequence.keys) // size, blocks)

    def first_to_leave(self, sequence: Sequence, blocks: int, needed: int) -> int:
        """The first block that a sequence lets go of when it goes back to the block `blocks`, and needs so many: that
        one as well if others may read it.
        """
        if blocks < sequence.path_ends[self.index].end:
            return blocks
        shared = blocks < needed and sequence.tables[self.index][blocks] in self.shared
        return blocks if shared else needed

    def share_uncached(self, slots: array[int]) -> None:
        """One more sequence holds these uncached blocks."""
        for slot in slots:
            self.shared[slot] = self.shared.get(slot, 1) + 1

    def return_uncached(self, slots: array[int]) -> array[int]:
        """A sequence lets go of uncached slots; returns those that nobody else holds, which are blank now."""
        if self.shared:
            slots = array("i", [slot for slot in slots if not self._still_held(slot)])
        self.levels[PRIMARY].return_slots(slots)
        return slots

    def _still_held(self, slot: int) -> bool:
        holders = self.shared.get(slot, 1) - 1
        if holders > 1:
            self.shared[slot] = holders
        elif holders == 1:
            del self.shared[slot]
        return holders > 0

    def forget_all(self) -> None:
        """Nothing is cached any more; what was is blank, or held without a name."""
        for level in self.levels:
            # A fixed order: that of the runs differs between a live state and one that was exported.
            level.blank = array("i", sorted(level.blank, reverse=True))
            level.unreferenced = 0
        self.tree.runs.clear()
        for root in list(self.tree.roots.values()):
            root.children.clear()
            root.order.clear()
            self.tree.drop_unused(root)
        self.watcher.cleared()
