"""The laws of the structure, proved from the whole of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from events.formats.vllm import Hash
from events.packed import TOKEN_BYTES
from kvcache.errors import InvariantViolated
from kvcache.prefixes.holder import Holder
from kvcache.prefixes.runs import Aliases, Holding, Owner, Plane, Root, Run, planes_of
from kvcache.prefixes.source import GROUPS_MAX, Source, Sources
from kvcache.prefixes.tree import RUN_BLOCKS_MAX, PrefixTree


class _Seen:
    """What the tree says that a holder has."""

    def __init__(self) -> None:
        self.names: dict[Hash, Holding | Aliases] = {}
        self.resident: Counter[Plane] = Counter()

    def name(self, name: Hash, holding: Holding | Aliases) -> None:
        """A name that is kept there."""
        _law(name not in self.names, "a name stands for two contents")
        self.names[name] = holding

    def count(self, masks: dict[Plane, int]) -> None:
        """Blocks that are there."""
        for plane, mask in masks.items():
            self.resident[plane] += mask.bit_count()


def prove(tree: PrefixTree, sources: Sources) -> None:
    """Raise InvariantViolated unless everything fits together."""
    seen: dict[Owner, _Seen] = {}
    for adapter, sizes in tree.roots.items():
        _law(bool(sizes), "an adapter without anything is kept")
        for size, root in sizes.items():
            _law(
                (root.adapter, root.block_bytes, root.size) == (adapter, size, 0),
                "a root is in a wrong place",
            )
            _law(bool(root.children), "a root with nothing below is kept")
    for root, run in tree.runs():
        _prove_run(root, run)
        for holder, first in run.holders.items():
            _prove_holding(holder, first, run, seen.setdefault(holder, _Seen()))
    known: set[Owner] = {holder for source in sources.values() for holder in source.holders.values()}
    _law(seen.keys() <= known, "somebody who is forgotten has blocks")
    for publisher, source in sources.items():
        _prove_source(publisher, source)
        for size, holder in source.holders.items():
            _law(
                holder.publisher == source.publisher
                and holder.counts is source.counts
                and holder.block_bytes == TOKEN_BYTES * size,
                "blocks belong to somebody else",
            )
            _law(not size or holder.tree is tree, "blocks are in another tree")
            _prove_holder(holder, seen.get(holder) or _Seen())


def _prove_run(root: Root, run: Run) -> None:
    _law(0 < run.size <= RUN_BLOCKS_MAX, "a run is empty or too long")
    _law(len(run.tokens) == run.size * root.block_bytes, "a run's tokens do not fit its blocks")
    _law(run.key == bytes(run.tokens[: root.block_bytes]) + run.extra, "a run's key is not its first block")
    _law(run.parent.children.get(run.key) is run, "a run does not hang below its parent")
    longest = max((len(first.names) for first in run.holders.values()), default=0)
    _law(longest == run.size, "a run has blocks that nobody needs")


def _prove_holding(holder: Owner, first: Holding, run: Run, seen: _Seen) -> None:
    assert isinstance(holder, Holder)
    _law(len(run.tokens) == run.size * holder.block_bytes, "blocks of one size are in a run of another")
    below = sum(holder in child.holders for child in run.children.values())
    _law(first.children == below, "the runs below are counted wrongly")
    if isinstance(run.parent, Run):
        above = run.parent.holders.get(holder)
        _law(above is not None and len(above.names) == run.parent.size, "what is before a block is not known")
    _law(not below or len(first.names) == run.size, "something is known behind an end")
    _law(bool(below) or first.end() == len(first.names), "a name is kept that nothing needs")
    _law(len(first.names) <= run.size, "more blocks are named than there are")
    _law(first.run is run, "a holding is of another run")
    there = 0
    for mask in first.masks.values():
        _law(mask > 0, "a mask is empty")
        there |= mask
    seen.count(first.masks)
    _law(there.bit_length() <= len(first.names), "a block without a name is somewhere")
    for at, name in enumerate(first.names):
        _law(name is not None or not there >> at & 1, "a block without a name is somewhere")
        if name is not None:
            seen.name(name, first)
    if first.more is not None:
        _prove_aliases(first, first.more, seen)


def _prove_aliases(first: Holding, aliases: Aliases, seen: _Seen) -> None:
    _law(aliases.first is first, "a holding is of another run")
    _law(bool(aliases.names), "room for second names is kept that nothing needs")
    masks: dict[Plane, int] = {}
    counts: Counter[tuple[Plane, int]] = Counter()
    for name, (place, planes) in aliases.names.items():
        _law(planes > 0, "a second name is kept that nothing needs")
        _law(place < len(first.names), "more blocks are named than there are")
        for plane in planes_of(planes):
            masks[plane] = masks.get(plane, 0) | 1 << place
            counts[plane, place] += 1
            seen.resident[plane] += 1
        seen.name(name, aliases)
    _law(aliases.masks == masks and aliases._counts == counts, "second names are counted wrongly")


def _prove_holder(holder: Holder, seen: _Seen) -> None:
    _law(holder.names == seen.names, "names are not those in the tree")
    _law(holder.names.keys().isdisjoint(holder.loose), "a name is known and loose")
    _law(all(planes > 0 for planes in holder.loose.values()), "a loose name is nowhere")
    for planes in holder.loose.values():
        seen.resident.update(plane for plane in range(planes.bit_length()) if planes >> plane & 1)
    _law(holder.resident == dict(seen.resident), "resident blocks are counted wrongly")
    _law(not holder._suspects, "a store is not finished")


def _prove_source(publisher: tuple[Hashable, int], source: Source) -> None:
    _law(source.publisher == publisher, "a publisher has another's place")
    _law(all(0 <= index < GROUPS_MAX for index in source.groups), "a group has a number that none has")
    followed = [group for group in source.groups.values() if group.followed]
    _law(source.followed == followed, "groups are followed that are not known")
    planes = {plane for group in followed for plane in group.planes}
    for group in source.groups.values():
        _law(source.holders.get(group.block_size) is group.holder, "a group's blocks are of another size")
    for holder in source.holders.values():
        _law(holder.resident.keys() <= planes, "blocks are in a group that is not followed")


def _law(holds: bool, law: str) -> None:
    if not holds:
        raise InvariantViolated(law, "in the prefix index")
