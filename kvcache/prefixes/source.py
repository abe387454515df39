"""One publisher: its groups and its blocks, folded from its events."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VLLMEvent
from events.packed import TOKEN_BYTES
from events.subscribe.index import level_of
from kvcache.prefixes.contents import contents_of
from kvcache.prefixes.groups import LEVELS, Group
from kvcache.prefixes.holder import Holder
from kvcache.prefixes.publisher import Counts, Publisher
from kvcache.prefixes.runs import Plane
from kvcache.prefixes.tree import PrefixTree

GROUPS_MAX = 64
"""Groups with higher numbers are ignored: nobody has as many, and what is noted of a group takes memory."""
PLANES_MAX = GROUPS_MAX * LEVELS
_HERE = (None, "LOCAL")


class Source:
    """What one publisher has told."""

    __slots__ = ("counts", "followed", "groups", "holders", "publisher", "tree")

    def __init__(self, publisher: Publisher, tree: PrefixTree) -> None:
        self.publisher = publisher
        self.tree = tree
        self.counts = Counts()
        self.groups: dict[int, Group] = {}
        self.followed: list[Group] = []
        """Those whose blocks are known."""
        self.holders: dict[int, Holder] = {}
        """By tokens per block."""

    def take(self, events: Sequence[VLLMEvent]) -> None:
        """Take in the events of one batch."""
        self.counts.batches += 1
        self.counts.events += len(events)
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.clear()
            else:
                self.counts.unknown_events += 1

    def clear(self) -> None:
        """Nothing is resident any more."""
        for holder in self.holders.values():
            holder.clear()

    def forget(self) -> None:
        """Nothing that was told holds any more."""
        self.clear()
        self.groups.clear()
        self.followed.clear()
        self.holders.clear()

    @property
    def only_plane(self) -> Plane | None:
        """The GPU memory of the only group, if it has full attention, and blocks nowhere else. So it is mostly."""
        if len(self.followed) != 1:
            return None
        group = self.followed[0]
        plane = group.index * LEVELS
        resident = group.holder.resident
        return plane if group.window is None and plane in resident and len(resident) == 1 else None

    def resident(self) -> tuple[int, int, int]:
        """Blocks by level, over all groups."""
        blocks = [0] * LEVELS
        for holder in self.holders.values():
            for plane, count in holder.resident.items():
                blocks[plane % LEVELS] += count
        return blocks[0], blocks[1], blocks[2]

    def holder(self, block_size: int) -> Holder:
        """The blocks of that many tokens."""
        holder = self.holders.get(block_size)
        if holder is None:
            holder = self.holders[block_size] = Holder(
                self.publisher, self.counts, self.tree, block_size * TOKEN_BYTES
            )
        return holder

    def add_group(self, index: int, kind: str | None, window: int | None, block_size: int) -> Group:
        """A group that was not known, or not like that."""
        group = self.groups[index] = Group(index, kind, window, self.holder(block_size))
        group.block_size = block_size
        self.followed = [each for each in self.groups.values() if each.followed]
        return group

    def _store(self, event: BlockStored) -> None:
        kind = event.kv_cache_spec_kind
        group = self.groups.get(event.group_idx or 0)
        # Notices about lower levels do not say what kind of group they are about.
        if group is None or (
            kind is not None and not group.is_like(kind, event.kv_cache_spec_sliding_window)
        ):
            group = self._new_group(event, group)
        if group is None or not group.followed or event.locality not in _HERE:
            self.counts.ignored_events += 1
            return
        hashes, size = event.block_hashes, event.block_size
        plane = group.index * LEVELS + _level(event.medium)
        blocks = _blocks_told(group, len(hashes), len(event.token_ids), size)
        if blocks and group.block_size != size and not self._learn_size(group, size):
            blocks = 0
        contents = contents_of(event, blocks) if blocks else None
        if contents is not None:
            group.holder.store(event.parent_block_hash, hashes[:blocks], contents, plane)
        else:
            blocks = 0
        if blocks < len(hashes):
            hashes = hashes[blocks:]
            self.counts.untold += 1
            group.holder.store_by_name(hashes, plane)

    def _remove(self, event: BlockRemoved) -> None:
        group = self.groups.get(event.group_idx or 0)
        if event.locality not in _HERE or (group is not None and not group.followed):
            self.counts.ignored_events += 1
        elif group is None:
            self.counts.unknown_removals += len(event.block_hashes)
        else:
            group.holder.remove(event.block_hashes, group.index * LEVELS + _level(event.medium))

    def _new_group(self, event: BlockStored, group: Group | None) -> Group | None:
        """The group that an event is about, which is new or not what it was; None: nobody has such a one."""
        index = event.group_idx or 0
        if not 0 <= index < GROUPS_MAX:
            return None
        size = 0 if group is None else group.block_size
        changed = self.add_group(index, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, size)
        if group is not None and not changed.followed:
            for plane in group.planes:
                group.holder.leave(plane)
        return changed

    def _learn_size(self, group: Group, size: int) -> bool:
        """Whether a group's blocks have that size, as far as was told before."""
        if group.block_size:
            return False
        group.block_size = size
        before, group.holder = group.holder, self.holder(size)
        group.holder.adopt(before, group.planes)
        return True


def _blocks_told(group: Group, hashes: int, tokens: int, size: int) -> int:
    """How many of a store's blocks it gives the tokens of.

    Where blocks are left out, as from sliding windows, nothing says which tokens are whose. With full attention none
    are, so tokens that are too few lack at the end.
    """
    if tokens == hashes * size:
        return hashes if size > 0 else 0
    return tokens // size if 0 < tokens < hashes * size and group.window is None else 0


_level = lru_cache(maxsize=64)(level_of)


Sources = dict[tuple[Hashable, int], Source]
"""By worker and rank."""
