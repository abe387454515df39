"""One publisher: its attention groups, and its blocks, folded from its events.

A name (a hash, to us an opaque number or bytes) stands for the content under which its publisher stored it. It is
remembered while its block is at any level, or something known follows the block: later events continue from there. A
second name of a block is remembered only while the block is at a level under that very name: a publisher could give any
number of them to one block. Blocks stored after a second name that is gone are known by their names only. A name
without a known content is *loose*: its block is somewhere, but its content was never published.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct, error
from typing import Any

import msgspec

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Hash, VLLMEvent
from events.packed import TOKEN_BYTES
from events.subscribe.index import GPU, STORAGE, level_of
from kvcache.prefixes.publisher import Counts, WorkerRank
from kvcache.prefixes.tree import (
    RUN_BLOCKS_MAX,
    Adapter,
    Aliases,
    ContentNode,
    ContentRun,
    ContentTree,
    Holding,
    Plane,
    common_blocks,
    next_extra,
    planes_of,
)

_encode = msgspec.msgpack.encode


class StoredContents(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one prefix."""

    adapter: Adapter
    tokens: bytes
    """int32 each."""
    extras: list[bytes] | None
    """Other inputs of each block's hash than adapter and tokens; None: nothing."""


def contents_of(event: BlockStored, blocks: int) -> StoredContents | None:
    """Return the content of the first blocks of a store; None if the event has none."""
    count = blocks * event.block_size
    try:
        tokens = _packer(count)(*event.token_ids[:count])
    except error:
        return None  # pairs, or numbers that are no token ids
    name = event.lora_name
    adapter = event.lora_id if name is None else name
    salt = event.cache_salt if event.parent_block_hash is None else None
    extras = event.extra_keys
    if extras is None or not any(extras):
        if salt is None:
            return StoredContents(adapter, tokens, None)
        extras = None
    if extras is not None and len(extras) < blocks:
        return None
    return StoredContents(adapter, tokens, pack_extras(extras or [None] * blocks, name, salt))


def pack_extras(
    extras: Sequence[Sequence[Any] | None], adapter: str | None, salt: str | None
) -> list[bytes] | None:
    """Pack the inputs of hashes other than tokens and adapter, block by block; None if there are none.

    `salt` is that of the prompt: publishers send it separately, or as the first block's last extra key, or both.
    """
    rows = [[key for key in keys or () if adapter is None or key != adapter] for keys in extras]
    if salt is not None and rows and salt not in rows[0]:
        rows[0].append(salt)
    return [_encode(row) if row else b"" for row in rows] if any(rows) else None


@lru_cache(maxsize=1024)
def _packer(tokens: int) -> Any:
    return Struct(f"<{tokens}i").pack


LEVELS = STORAGE + 1
_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_SLIDING = ("sliding_window", "sliding_window_mla")


class PublishedGroup:
    """Blocks that one kind of layers shares."""

    def __init__(self, index: int, kind: str | None, window: int | None, holder: Holder) -> None:
        self.index = index
        self.kind = kind
        self.window = window
        """Tokens that it attends to; None: all."""
        full = kind in _FULL or (kind is None and not index)
        self.followed = window is None if full else kind in _SLIDING and window is not None and window > 0
        """True if its blocks are followed here. The needs of other kinds in order to serve a prefix are not known."""
        self.block_size = 0
        """Tokens of a block; 0 before any event with that."""
        self.holder = holder

    @property
    def planes(self) -> range:
        """Planes of its levels."""
        return range(self.index * LEVELS, self.index * LEVELS + LEVELS)

    def servable(self, mask: int, blocks: int) -> int:
        """Largest number of blocks, at most `blocks`, that it can serve if its blocks are those in `mask`.

        With full attention that takes all of them; else those inside the window after the last one.
        """
        if self.window is None:
            return min(blocks, leading(mask))
        size = self.block_size or 1
        while blocks:
            first = max(0, blocks * size - self.window + 1) // size
            missing = ~mask & ((1 << blocks) - (1 << first)) if first < blocks else 0
            if not missing:
                break
            # Any prefix that ends after the last missing block needs that block, too.
            blocks = missing.bit_length() - 1
        return blocks


def leading(mask: int) -> int:
    """Count the lowest bits that are set without a gap."""
    return (mask ^ (mask + 1)).bit_length() - 1


def servable(
    groups: Sequence[PublishedGroup], rows: Mapping[Plane, int], stop: int, *, in_tokens: bool
) -> list[int]:
    """Compute the longest prefix that all groups can serve from level 0, from levels 0 and 1, and from all.

    `rows` are the blocks of the prompt in each plane. The prompt and the result are in tokens, or in blocks of which
    all groups have the same.
    """
    masks, found = [0] * len(groups), []
    for level in range(GPU, LEVELS):
        masks = [mask | rows.get(group.planes[level], 0) for group, mask in zip(groups, masks, strict=True)]
        best, shorter = -1, stop
        while shorter != best:
            best = shorter
            for group, mask in zip(groups, masks, strict=True):
                size = group.block_size if in_tokens else 1
                shorter = group.servable(mask, shorter // size) * size if size else 0
        found.append(best)
    return found


class Holder:
    """Blocks of one publisher with one size."""

    def __init__(self, publisher: WorkerRank, counts: Counts, tree: ContentTree, block_bytes: int) -> None:
        self.publisher = publisher
        self.counts = counts
        self.tree = tree
        self.block_bytes = block_bytes
        """Bytes of a block's tokens; 0: the content of these blocks is unpublished."""
        self.names: dict[Hash, Holding | Aliases] = {}
        self.unresolved: dict[Hash, int] = {}
        """Loose names to the planes that they are in, as bits."""
        self.resident: dict[Plane, int] = {}
        """Number of names in each plane."""
        self._suspects: list[Holding] = []
        """Holdings that lost a name in the middle of a store."""

    # -- stores

    def store(
        self, parent: Hash | None, hashes: Sequence[Hash], contents: StoredContents, plane: Plane
    ) -> None:
        """Store blocks with known contents after `parent` or (None) at the start of a prompt."""
        node: ContentNode | None = None
        at = 0
        if parent is not None:
            holding = self.names.get(parent)
            if holding is None:
                self.counts.orphans += 1
                self.store_by_name(hashes, plane)
                return
            node = holding.run
            if (
                contents.extras is None
                and isinstance(holding, Holding)
                and self._grows(holding, parent, hashes)
            ):
                self._append(holding, hashes, plane)
                node.tokens += contents.tokens
                node.size += len(hashes)
                return
            at = holding.place(parent) + 1
        if len(set(hashes)) < len(hashes):
            # A name cannot have two contents.
            self.counts.contradictions += 1
            self.store_by_name(tuple(dict.fromkeys(hashes)), plane)
            return
        if node is None:
            node = self.tree.root(contents.adapter, self.block_bytes)
        self._store_after(node, at, hashes, contents, plane)

    def store_by_name(self, hashes: Sequence[Hash], plane: Plane) -> None:
        """Store blocks without published content, which an earlier event may have published."""
        bit, repeated = 1 << plane, 0
        for name in hashes:
            holding = self.names.get(name)
            if holding is not None:
                added = holding.mark_name(name, plane)
            else:
                planes = self.unresolved.get(name, 0)
                self.unresolved[name] = planes | bit
                added = not planes & bit
            repeated += not added
        self.counts.repeated_stores += repeated
        self._count(plane, len(hashes) - repeated)

    def adopt(self, other: Holder, planes: Sequence[Plane]) -> None:
        """Take over the loose names of these planes, after the block size of their group has become known."""
        for plane in planes:
            names = [name for name, there in other.unresolved.items() if there >> plane & 1]
            for name in names:
                other._remove_unresolved(name, plane)
            self.store_by_name(names, plane)

    def _grows(self, holding: Holding, parent: Hash, hashes: Sequence[Hash]) -> bool:
        """Claim the names and return True if blocks after `parent` just extend its run."""
        run, size = holding.run, len(holding.names)
        return (
            holding.names[-1] == parent
            and not run.children
            and size == run.size <= RUN_BLOCKS_MAX - len(hashes)
            and self._claim(hashes, holding)
        )

    def _claim(self, hashes: Sequence[Hash], holding: Holding) -> bool:
        """Assign names to blocks of a holding; returns False, with no change, unless all are new and different."""
        names = self.names
        if not names.keys().isdisjoint(hashes) or (self.unresolved and any(map(self.unresolved.get, hashes))):
            return False
        before = len(names)
        names.update(zip(hashes, repeat(holding)))
        if len(names) - before == len(hashes):
            return True
        for name in set(hashes):
            del names[name]
        return False

    def _append(self, holding: Holding, hashes: Sequence[Hash], plane: Plane) -> None:
        """Append claimed names, for blocks right after the last one that has one."""
        count, masks = len(hashes), holding.masks
        masks[plane] = masks.get(plane, 0) | (((1 << count) - 1) << len(holding.names))
        holding.names += hashes
        self.resident[plane] = self.resident.get(plane, 0) + count

    def _store_after(
        self, node: ContentNode, at: int, hashes: Sequence[Hash], contents: StoredContents, plane: Plane
    ) -> None:
        """Store after the first `at` blocks of a node: along existing runs, and new runs for the rest."""
        done, count, size, extras = 0, len(hashes), self.block_bytes, contents.extras
        while done < count:
            if at < node.size:
                assert isinstance(node, ContentRun)
                plain = next_extra(extras, done + (not at), count)
                same = common_blocks(node, at, contents.tokens, done, plain)
                if not same:
                    node = self.tree.split(node, at)
                    continue
            else:
                extra = extras[done] if extras else b""
                child = node.children.get(contents.tokens[done * size : (done + 1) * size] + extra)
                if child is not None:
                    node, at = child, 0
                    continue
                node, at, same = self._new_blocks(
                    node, extra, contents, done, next_extra(extras, done + 1, count)
                )
            self._name(node, at, hashes[done : done + same], plane)
            at += same
            done += same
        self._trim_suspects()

    def _new_blocks(
        self, node: ContentNode, extra: bytes, contents: StoredContents, begin: int, end: int
    ) -> tuple[ContentRun, int, int]:
        """Append new blocks to the end of a node; returns run, place, and the number that fitted."""
        tokens = contents.tokens[begin * self.block_bytes : end * self.block_bytes]
        if isinstance(node, ContentRun) and not (node.children or extra) and node.size < RUN_BLOCKS_MAX:
            at = node.size
            tokens = tokens[: (RUN_BLOCKS_MAX - at) * self.block_bytes]
            node.tokens += tokens
            node.size += len(tokens) // self.block_bytes
            return node, at, node.size - at
        run = self.tree.add(node, extra, tokens, self.block_bytes)
        return run, 0, run.size

    def _name(self, run: ContentRun, at: int, hashes: Sequence[Hash], plane: Plane) -> None:
        """Name consecutive blocks of a run, all of which are present now."""
        holding = run.holders.get(self)
        if holding is None:
            holding = run.holders[self] = Holding(run)
            if isinstance(run.parent, ContentRun):
                run.parent.holders[self].children += 1
        count = len(hashes)
        if at == len(holding.names) and self._claim(hashes, holding):
            self._append(holding, hashes, plane)
        elif holding.names[at : at + count] == list(hashes):
            added = holding.mark(plane, at, count)
            self.counts.repeated_stores += count - added
            self._count(plane, added)
        else:
            for place, name in enumerate(hashes, at):
                self._name_one(holding, place, name, plane)

    def _name_one(self, first: Holding, at: int, name: Hash, plane: Plane) -> None:
        known = self.names.get(name)
        if known is not None and (known.run is not first.run or known.place(name) != at):
            # It was the name of something else. Its publisher decides about its present content.
            self.counts.contradictions += 1
            self._take_name(known, name)
            known = None
        if known is None:
            known = self._add_name(first, at, name)
            for there in planes_of(self.unresolved.pop(name, 0)):
                known.mark_name(name, there)
        added = known.mark_name(name, plane)
        self.counts.repeated_stores += not added
        self._count(plane, added)

    def _add_name(self, first: Holding, at: int, name: Hash) -> Holding | Aliases:
        """Assign a name to a block, as its first one if it has none; returns what keeps it."""
        names = first.names
        names += [None] * (at + 1 - len(names))
        if names[at] is None:
            names[at] = name
            self.names[name] = first
            return first
        self.counts.aliases += 1
        aliases = self.names[name] = first.add_alias(name, at)
        return aliases

    # -- removals

    def remove(self, hashes: Sequence[Hash], plane: Plane) -> None:
        """Remove blocks from a plane."""
        at, names = 0, self.names
        while at < len(hashes):
            name = hashes[at]
            holding = names.get(name)
            if holding is None:
                self._remove_unresolved(name, plane)
                at += 1
                continue
            if isinstance(holding, Aliases):
                self._remove_alias(holding, name, plane)
                at += 1
                continue
            last = holding.place(name)
            # Leaves are removed first: mostly the next ones are the blocks before it.
            most = min(last + 1, len(hashes) - at)
            count = _common(holding.names[last - most + 1 : last + 1][::-1], hashes[at : at + most])
            gone = holding.unmark(plane, last - count + 1, count)
            self._count(plane, -gone)
            if gone < count:
                self.counts.unknown_removals += count - gone
            if last + 1 == len(holding.names):
                self._trim(holding)
            at += count

    def _remove_alias(self, aliases: Aliases, name: Hash, plane: Plane) -> None:
        if not aliases.unmark_name(name, plane):
            self.counts.unknown_removals += 1
            return
        self._count(plane, -1)
        if name not in aliases.names:
            del self.names[name]
            self._trim(aliases.first)

    def leave(self, plane: Plane) -> None:
        """Remove all blocks from a plane."""
        for holding in set(self.names.values()):
            self.remove(holding.in_plane(plane)[::-1], plane)
        self.remove([name for name, planes in self.unresolved.items() if planes >> plane & 1], plane)

    def _remove_unresolved(self, name: Hash, plane: Plane) -> None:
        planes = self.unresolved.get(name, 0)
        if not planes & (1 << plane):
            self.counts.unknown_removals += 1
            return
        self._count(plane, -1)
        if planes == 1 << plane:
            del self.unresolved[name]
        else:
            self.unresolved[name] = planes ^ (1 << plane)

    def _take_name(self, holding: Holding | Aliases, name: Hash) -> None:
        """Remove a name from this block in all planes."""
        if isinstance(holding, Aliases):
            self._suspects.append(holding.first)
            for plane in planes_of(holding.names[name][1]):
                self._count(plane, -holding.unmark_name(name, plane))
        else:
            self._suspects.append(holding)
            at = holding.place(name)
            for plane in list(holding.masks):
                self._count(plane, -holding.unmark(plane, at, 1))
            holding.names[at] = None
        del self.names[name]

    def _trim_suspects(self) -> None:
        for first in self._suspects:
            if first.run.holders.get(self) is first:
                self._trim(first)
        self._suspects.clear()

    def _trim(self, first: Holding) -> None:
        """Forget the end of a run that has no names any more, and so on towards the root."""
        while not first.children:
            end, run = first.end(), first.run
            if end == len(first.names):
                return
            full = len(first.names) == run.size
            for name in first.names[end:]:
                if name is not None:
                    del self.names[name]
            del first.names[end:]
            if not end:
                del run.holders[self]
            if full or not end:
                self.tree.shrink(run)
            if end or not isinstance(run.parent, ContentRun):
                return
            first = run.parent.holders[self]
            first.children -= 1

    def clear(self) -> None:
        """Forget everything."""
        runs: set[ContentRun] = set()
        for holding in set(self.names.values()):
            # The parents may have no name left.
            above: ContentNode = holding.run
            while isinstance(above, ContentRun) and above not in runs:
                runs.add(above)
                above = above.parent
        for run in runs:
            del run.holders[self]
        for run in runs:
            # If others have something below, the last of them does this.
            self.tree.shrink(run)
        self.names.clear()
        self.unresolved.clear()
        self.resident.clear()

    # -- for the tree, and for queries

    def split(self, holding: Holding, at: int, upper: ContentRun) -> None:
        """Assign the first `at` blocks of a run to `upper`; `holding` is our part of the run."""
        run = holding.run
        if len(holding.names) <= at:
            del run.holders[self]
            holding.run = upper
            upper.holders[self] = holding
            return
        above = holding.cut(at, upper)
        self.names.update((name, above) for name in above.names if name is not None)
        for first in (above, holding):
            if first.more is not None:
                self.names.update(dict.fromkeys(first.more.names, first.more))
        upper.holders[self] = above
        above.children = 1

    def rows(self, hashes: Sequence[Hash], *, to_the_end: bool) -> dict[Plane, int]:
        """Return a bit mask per plane of these names; unless `to_the_end`, up to the first unknown one."""
        found: dict[Plane, int] = {}
        at = 0
        while at < len(hashes):
            name = hashes[at]
            holding = self.names.get(name)
            count = 1
            if isinstance(holding, Aliases):
                for plane in planes_of(holding.names[name][1]):
                    found[plane] = found.get(plane, 0) | 1 << at
            elif holding is not None:
                place = holding.place(name)
                most = min(len(holding.names) - place, len(hashes) - at)
                count = _common(holding.names[place : place + most], hashes[at : at + most])
                ones = (1 << count) - 1
                for plane, mask in holding.masks.items():
                    found[plane] = found.get(plane, 0) | (mask >> place & ones) << at
            elif name in self.unresolved:
                for plane in planes_of(self.unresolved[name]):
                    found[plane] = found.get(plane, 0) | 1 << at
            elif not to_the_end:
                break
            at += count
        return found

    def _count(self, plane: Plane, change: int) -> None:
        if change:
            left = self.resident.get(plane, 0) + change
            if left:
                self.resident[plane] = left
            else:
                del self.resident[plane]


def _common(names: Sequence[Hash | None], hashes: Sequence[Hash]) -> int:
    """Count the leading hashes that equal the leading names."""
    if list(names) == list(hashes):
        return len(hashes)
    return next(at for at, pair in enumerate(zip(names, hashes, strict=True)) if pair[0] != pair[1])


GROUPS_MAX = 64
"""Groups with this number and above are ignored: no engine has as many, and each group takes memory."""
PLANES_MAX = GROUPS_MAX * LEVELS
_HERE = (None, "LOCAL")


class PublisherState:
    """State of one publisher."""

    def __init__(self, publisher: WorkerRank, tree: ContentTree) -> None:
        self.publisher = publisher
        self.tree = tree
        self.counts = Counts()
        self.groups: dict[int, PublishedGroup] = {}
        self.followed: list[PublishedGroup] = []
        """Groups with known blocks."""
        self.holders: dict[int, Holder] = {}
        """Holders by tokens per block."""

    def take(self, events: Sequence[VLLMEvent]) -> None:
        """Apply the events of one batch."""
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
        """Remove all resident blocks."""
        for holder in self.holders.values():
            holder.clear()

    def forget(self) -> None:
        """Forget everything published."""
        self.clear()
        self.groups.clear()
        self.followed.clear()
        self.holders.clear()

    @property
    def only_plane(self) -> Plane | None:
        """GPU memory plane of the only group, if it has full attention, and blocks nowhere else: the usual case."""
        if len(self.followed) != 1:
            return None
        group = self.followed[0]
        plane = group.index * LEVELS
        resident = group.holder.resident
        return plane if group.window is None and plane in resident and len(resident) == 1 else None

    def resident(self) -> tuple[int, int, int]:
        """Number of blocks by level, over all groups."""
        blocks = [0] * LEVELS
        for holder in self.holders.values():
            for plane, count in holder.resident.items():
                blocks[plane % LEVELS] += count
        return blocks[0], blocks[1], blocks[2]

    def holder(self, block_size: int) -> Holder:
        """Return the holder of blocks with this number of tokens."""
        holder = self.holders.get(block_size)
        if holder is None:
            holder = self.holders[block_size] = Holder(
                self.publisher, self.counts, self.tree, block_size * TOKEN_BYTES
            )
        return holder

    def add_group(self, index: int, kind: str | None, window: int | None, block_size: int) -> PublishedGroup:
        """Add a group that is new, or has changed."""
        group = self.groups[index] = PublishedGroup(index, kind, window, self.holder(block_size))
        group.block_size = block_size
        self.followed = [each for each in self.groups.values() if each.followed]
        return group

    def _store(self, event: BlockStored) -> None:
        kind = event.kv_cache_spec_kind
        group = self.groups.get(event.group_idx or 0)
        # Notices about lower levels do not include the kind of their group.
        given = kind, event.kv_cache_spec_sliding_window
        if group is None or (kind is not None and (group.kind, group.window) != given):
            group = self._new_group(event, group)
        if group is None or not group.followed or event.locality not in _HERE:
            self.counts.ignored_events += 1
            return
        hashes, size = event.block_hashes, event.block_size
        plane = group.index * LEVELS + _level(event.medium)
        blocks = _blocks_with_tokens(group, len(hashes), len(event.token_ids), size)
        if blocks and group.block_size != size and not self._learn_size(group, size):
            blocks = 0
        contents = contents_of(event, blocks) if blocks else None
        if contents is not None:
            group.holder.store(event.parent_block_hash, hashes[:blocks], contents, plane)
        else:
            blocks = 0
        if blocks < len(hashes):
            hashes = hashes[blocks:]
            self.counts.stores_without_tokens += 1
            group.holder.store_by_name(hashes, plane)

    def _remove(self, event: BlockRemoved) -> None:
        group = self.groups.get(event.group_idx or 0)
        if event.locality not in _HERE or (group is not None and not group.followed):
            self.counts.ignored_events += 1
        elif group is None:
            self.counts.unknown_removals += len(event.block_hashes)
        else:
            group.holder.remove(event.block_hashes, group.index * LEVELS + _level(event.medium))

    def _new_group(self, event: BlockStored, group: PublishedGroup | None) -> PublishedGroup | None:
        """Return the group of an event, which is new or has changed; None: it is impossible."""
        index = event.group_idx or 0
        if not 0 <= index < GROUPS_MAX:
            return None
        size = 0 if group is None else group.block_size
        changed = self.add_group(index, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, size)
        if group is not None and not changed.followed:
            for plane in group.planes:
                group.holder.leave(plane)
        return changed

    def _learn_size(self, group: PublishedGroup, size: int) -> bool:
        """True if a group's blocks have that size, according to all events so far."""
        if group.block_size:
            return False
        group.block_size = size
        before, group.holder = group.holder, self.holder(size)
        group.holder.adopt(before, group.planes)
        return True


def _blocks_with_tokens(group: PublishedGroup, hashes: int, tokens: int, size: int) -> int:
    """Count the blocks of a store that come with their tokens.

    If blocks are left out, as from sliding windows, tokens cannot be assigned to blocks. With full attention none are,
    so if tokens are too few, the last ones are missing.
    """
    if tokens == hashes * size:
        return hashes if size > 0 else 0
    return tokens // size if 0 < tokens < hashes * size and group.window is None else 0


_level = lru_cache(maxsize=64)(level_of)


Sources = dict[tuple[Hashable, int], PublisherState]
"""Publishers by worker and rank."""
