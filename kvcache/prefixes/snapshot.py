"""An index in a file, and a proof of the consistency of what is read from it.

A header with version, length and digest is followed by one msgpack value. A file is written under another name, made
durable, and then renamed: it is whole, or the previous one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec

from events.formats.vllm import Hash
from events.log.durable import replace_file
from events.packed import TOKEN_BYTES
from kvcache.errors import InvariantViolated, SnapshotError, Unsupported
from kvcache.prefixes.publisher import Counts, WorkerRank
from kvcache.prefixes.source import GROUPS_MAX, PLANES_MAX, Holder, PublisherState, Sources
from kvcache.prefixes.tree import (
    RUN_BLOCKS_MAX,
    Adapter,
    Aliases,
    ContentNode,
    ContentRoot,
    ContentRun,
    ContentTree,
    Holding,
    Owner,
    Plane,
    planes_of,
)


class _Seen:
    """A holder according to the tree: its names, and their number in each plane."""

    def __init__(self) -> None:
        self.names: dict[Hash, Holding | Aliases] = {}
        self.resident: Counter[Plane] = Counter()

    def name(self, name: Hash, holding: Holding | Aliases) -> None:
        """Count a name that is kept there."""
        _require(name not in self.names, "a name stands for two contents")
        self.names[name] = holding


def prove(tree: ContentTree, sources: Sources) -> None:
    """Raise InvariantViolated unless everything fits together."""
    seen: dict[Owner, _Seen] = {}
    for adapter, sizes in tree.roots.items():
        _require(bool(sizes), "an adapter without anything is kept")
        for size, root in sizes.items():
            _require(
                (root.adapter, root.block_bytes, root.size) == (adapter, size, 0),
                "a root is in a wrong place",
            )
            _require(bool(root.children), "a root with nothing below is kept")
    for root, run in tree.runs():
        _prove_run(root, run)
        for holder, first in run.holders.items():
            _prove_holding(holder, first, run, seen.setdefault(holder, _Seen()))
    known: set[Owner] = {holder for source in sources.values() for holder in source.holders.values()}
    _require(seen.keys() <= known, "somebody who is forgotten has blocks")
    for publisher, source in sources.items():
        _prove_source(publisher, source)
        for size, holder in source.holders.items():
            _require(
                holder.publisher == source.publisher
                and holder.counts is source.counts
                and holder.block_bytes == TOKEN_BYTES * size,
                "blocks belong to somebody else",
            )
            _require(not size or holder.tree is tree, "blocks are in another tree")
            _prove_holder(holder, seen.get(holder) or _Seen())


def _prove_run(root: ContentRoot, run: ContentRun) -> None:
    _require(0 < run.size <= RUN_BLOCKS_MAX, "a run is empty or too long")
    _require(len(run.tokens) == run.size * root.block_bytes, "a run's tokens do not fit its blocks")
    _require(
        run.key == bytes(run.tokens[: root.block_bytes]) + run.extra, "a run's key is not its first block"
    )
    _require(run.parent.children.get(run.key) is run, "a run does not hang below its parent")
    longest = max((len(first.names) for first in run.holders.values()), default=0)
    _require(longest == run.size, "a run has blocks that nobody needs")


def _prove_holding(holder: Owner, first: Holding, run: ContentRun, seen: _Seen) -> None:
    assert isinstance(holder, Holder)
    _require(len(run.tokens) == run.size * holder.block_bytes, "blocks of one size are in a run of another")
    below = sum(holder in child.holders for child in run.children.values())
    _require(first.children == below, "the runs below are counted wrongly")
    if isinstance(run.parent, ContentRun):
        above = run.parent.holders.get(holder)
        _require(
            above is not None and len(above.names) == run.parent.size, "what is before a block is not known"
        )
    _require(not below or len(first.names) == run.size, "something is known behind an end")
    _require(bool(below) or first.end() == len(first.names), "a name is kept that nothing needs")
    _require(len(first.names) <= run.size, "more blocks are named than there are")
    _require(first.run is run, "a holding is of another run")
    there = 0
    for mask in first.masks.values():
        _require(mask > 0, "a mask is empty")
        there |= mask
    seen.resident.update({plane: mask.bit_count() for plane, mask in first.masks.items()})
    _require(there.bit_length() <= len(first.names), "a block without a name is somewhere")
    for at, name in enumerate(first.names):
        _require(name is not None or not there >> at & 1, "a block without a name is somewhere")
        if name is not None:
            seen.name(name, first)
    if first.more is not None:
        _prove_aliases(first, first.more, seen)


def _prove_aliases(first: Holding, aliases: Aliases, seen: _Seen) -> None:
    _require(aliases.first is first, "a holding is of another run")
    _require(bool(aliases.names), "room for second names is kept that nothing needs")
    masks: dict[Plane, int] = {}
    counts: Counter[tuple[Plane, int]] = Counter()
    for name, (place, planes) in aliases.names.items():
        _require(planes > 0, "a second name is kept that nothing needs")
        _require(place < len(first.names), "more blocks are named than there are")
        for plane in planes_of(planes):
            masks[plane] = masks.get(plane, 0) | 1 << place
            counts[plane, place] += 1
            seen.resident[plane] += 1
        seen.name(name, aliases)
    _require(aliases.masks == masks and aliases._counts == counts, "second names are counted wrongly")


def _prove_holder(holder: Holder, seen: _Seen) -> None:
    _require(holder.names == seen.names, "names are not those in the tree")
    _require(holder.names.keys().isdisjoint(holder.unresolved), "a name is known and loose")
    _require(all(planes > 0 for planes in holder.unresolved.values()), "a loose name is nowhere")
    for planes in holder.unresolved.values():
        seen.resident.update(plane for plane in range(planes.bit_length()) if planes >> plane & 1)
    _require(holder.resident == dict(seen.resident), "resident blocks are counted wrongly")
    _require(not holder._suspects, "a store is not finished")


def _prove_source(publisher: tuple[Hashable, int], source: PublisherState) -> None:
    _require(source.publisher == publisher, "a publisher has another's place")
    _require(all(0 <= index < GROUPS_MAX for index in source.groups), "a group has a number that none has")
    followed = [group for group in source.groups.values() if group.followed]
    _require(source.followed == followed, "groups are followed that are not known")
    planes = {plane for group in followed for plane in group.planes}
    for group in source.groups.values():
        _require(source.holders.get(group.block_size) is group.holder, "a group's blocks are of another size")
    for holder in source.holders.values():
        _require(holder.resident.keys() <= planes, "blocks are in a group that is not followed")


def _require(holds: bool, law: str) -> None:
    if not holds:
        raise InvariantViolated(law, "in the prefix index")


_MAGIC = b"kvprefix"
_VERSION = 1
_HEADER = struct.Struct("<8sIQ32s")
"""Magic, version, bytes after the header, their SHA-256."""


class _SavedHolding(msgspec.Struct, array_like=True):
    names: list[Hash | None]
    masks: dict[Plane, bytes]
    more: list[tuple[Hash, int, bytes]]
    """Second names: the block's place in the run, and planes as bits."""


class _SavedRun(msgspec.Struct, array_like=True):
    parent: int
    """Number of the run above, in the order of the file; -1: the root."""
    adapter: Adapter
    block_bytes: int
    extra: bytes
    tokens: bytes
    holders: dict[int, _SavedHolding]
    """Holdings by the number of the holder, in the order of the file."""


class _SavedHolder(msgspec.Struct, array_like=True):
    block_size: int
    unresolved: list[tuple[Hash, bytes]]
    resident: dict[Plane, int]


class _SavedGroup(msgspec.Struct, array_like=True):
    index: int
    kind: str | None
    window: int | None
    block_size: int


class _SavedPublisher(msgspec.Struct, array_like=True):
    worker: Any
    rank: int
    counts: Counts
    groups: list[_SavedGroup]
    holders: list[_SavedHolder]


class _SavedIndex(msgspec.Struct, array_like=True):
    sources: list[_SavedPublisher]
    runs: list[_SavedRun]


def save(path: Path, tree: ContentTree, sources: Sources) -> None:
    """Write an index. Raises Unsupported, UnsafeFile, OSError."""
    payload = msgspec.msgpack.encode(
        _SavedIndex([_source(source) for source in sources.values()], _runs(tree, sources))
    )
    header = _HEADER.pack(_MAGIC, _VERSION, len(payload), hashlib.sha256(payload).digest())
    replace_file(path.absolute(), header, payload, suffix=f".{os.getpid()}-{secrets.token_hex(4)}.new")


def load(path: Path, tree: ContentTree, sources: Sources) -> None:
    """Read an index into one that is empty. Raises SnapshotError, OSError."""
    content = path.read_bytes()
    if content[: len(_MAGIC)] != _MAGIC[: len(content)] or not content:
        raise SnapshotError(path, "foreign")
    if len(content) < _HEADER.size:
        raise SnapshotError(path, "damaged", "it ends inside its header")
    _, version, length, digest = _HEADER.unpack_from(content)
    if version > _VERSION:
        raise SnapshotError(path, "newer", str(version))
    payload = memoryview(content)[_HEADER.size :]
    if len(payload) != length:
        raise SnapshotError(path, "damaged", f"{len(payload)} bytes follow the header instead of {length}")
    if hashlib.sha256(payload).digest() != digest:
        raise SnapshotError(path, "damaged", "its checksum does not match")
    try:
        _rebuild(msgspec.msgpack.decode(payload, type=_SavedIndex), tree, sources)
        prove(tree, sources)
    except InvariantViolated as error:
        raise SnapshotError(path, "damaged", error.law) from None
    except (msgspec.MsgspecError, RecursionError, LookupError, ValueError, TypeError, ArithmeticError):
        raise SnapshotError(path, "damaged", "its content is not an index") from None


# -- writing


def _source(source: PublisherState) -> _SavedPublisher:
    worker, rank = source.publisher
    groups = [
        _SavedGroup(each.index, each.kind, each.window, each.block_size) for each in source.groups.values()
    ]
    holders = [
        _SavedHolder(
            size, [(name, _bytes(planes)) for name, planes in each.unresolved.items()], each.resident
        )
        for size, each in source.holders.items()
    ]
    return _SavedPublisher(_plain(worker), rank, source.counts, groups, holders)


def _plain(worker: Hashable) -> Any:
    if isinstance(worker, tuple):
        return [_plain(each) for each in worker]
    if worker is None or type(worker) in (bool, int, float, str, bytes):
        return worker
    instead = "use ids made of None, bool, int, float, str, bytes and tuples"
    raise Unsupported(f"saving a worker id of type {type(worker).__name__}", instead)


def _runs(tree: ContentTree, sources: Sources) -> list[_SavedRun]:
    holders = [holder for source in sources.values() for holder in source.holders.values()]
    numbers: dict[Owner, int] = {holder: number for number, holder in enumerate(holders)}
    places: dict[ContentNode, int] = {}
    rows = []
    for root, run in tree.runs():
        places[run] = len(places)
        held = {numbers[holder]: _held(first) for holder, first in run.holders.items()}
        above = places.get(run.parent, -1)
        rows.append(_SavedRun(above, root.adapter, root.block_bytes, run.extra, bytes(run.tokens), held))
    return rows


def _held(first: Holding) -> _SavedHolding:
    more = {} if first.more is None else first.more.names
    return _SavedHolding(
        first.names,
        {plane: _bytes(mask) for plane, mask in first.masks.items()},
        [(name, place, _bytes(planes)) for name, (place, planes) in more.items()],
    )


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


# -- reading


def _rebuild(file: _SavedIndex, tree: ContentTree, sources: Sources) -> None:
    holders: list[Holder] = []
    for row in file.sources:
        publisher = WorkerRank(_hashable(row.worker), row.rank)
        source = sources[publisher] = PublisherState(publisher, tree)
        source.counts = row.counts
        for saved in row.holders:
            holder = source.holder(saved.block_size)
            holder.unresolved = {name: int.from_bytes(planes, "little") for name, planes in saved.unresolved}
            holder.resident = saved.resident
            holders.append(holder)
        for group in row.groups:
            source.add_group(group.index, group.kind, group.window, group.block_size)
    runs: list[ContentRun] = []
    for each in file.runs:
        parent = tree.root(each.adapter, each.block_bytes) if each.parent < 0 else runs[each.parent]
        run = tree.add(parent, each.extra, each.tokens, each.block_bytes)
        runs.append(run)
        for number, held in each.holders.items():
            _rebuild_holding(run, holders[number], held)


def _rebuild_holding(run: ContentRun, holder: Holder, held: _SavedHolding) -> None:
    first = run.holders[holder] = Holding(run)
    first.names = held.names
    first.masks = {plane: int.from_bytes(mask, "little") for plane, mask in held.masks.items()}
    holder.names.update((name, first) for name in first.names if name is not None)
    for name, place, planes in held.more:
        if not 0 <= place < len(first.names) or len(planes) * 8 > PLANES_MAX:
            raise ValueError("an unknown place or plane")
        holder.names[name] = first.add_alias(name, place, int.from_bytes(planes, "little"))
    if isinstance(run.parent, ContentRun):
        run.parent.holders[holder].children += 1


def _hashable(worker: Any) -> Hashable:
    return tuple(map(_hashable, worker)) if isinstance(worker, list) else worker
