"""An index in a file: a header with version, length and digest, then one msgpack value.

A file is written beside its name, made durable, and takes the name then: it is whole, or what was there before.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec

from events.formats.vllm import Hash
from events.log.durable import sync_directory, sync_file, write_all
from kvcache.errors import InvariantViolated, NotASnapshot, SnapshotDamaged, SnapshotTooNew, Unsupported
from kvcache.prefixes import check
from kvcache.prefixes.holder import Holder
from kvcache.prefixes.publisher import Counts, Publisher
from kvcache.prefixes.runs import Adapter, Holding, Node, Owner, Plane, Run, planes_of
from kvcache.prefixes.source import PLANES_MAX, Source, Sources
from kvcache.prefixes.tree import PrefixTree

_MAGIC = b"kvprefix"
_VERSION = 1
_HEADER = struct.Struct("<8sIQ32s")
"""Magic, version, bytes behind the header, their SHA-256."""


class _Layer(msgspec.Struct, array_like=True):
    names: list[Hash | None]
    masks: dict[Plane, bytes]


class _Run(msgspec.Struct, array_like=True):
    parent: int
    """The number of the run above, in the order of the file; -1: the root."""
    adapter: Adapter
    block_bytes: int
    extra: bytes
    tokens: bytes
    holders: dict[int, list[_Layer]]
    """By the number of the holder, in the order of the file."""


class _Holder(msgspec.Struct, array_like=True):
    block_size: int
    loose: list[tuple[Hash, bytes]]
    resident: dict[Plane, int]


class _Group(msgspec.Struct, array_like=True):
    index: int
    kind: str | None
    window: int | None
    block_size: int


class _Source(msgspec.Struct, array_like=True):
    worker: Any
    rank: int
    counts: Counts
    groups: list[_Group]
    holders: list[_Holder]


class _File(msgspec.Struct, array_like=True):
    sources: list[_Source]
    runs: list[_Run]


def save(path: Path, tree: PrefixTree, sources: Sources) -> None:
    """Write an index. Raises Unsupported, OSError."""
    payload = msgspec.msgpack.encode(
        _File([_source(source) for source in sources.values()], _runs(tree, sources))
    )
    header = _HEADER.pack(_MAGIC, _VERSION, len(payload), hashlib.sha256(payload).digest())
    path = path.absolute()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        try:
            write_all(descriptor, [header, payload])
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def load(path: Path, tree: PrefixTree, sources: Sources) -> None:
    """Read an index into one that is empty. Raises NotASnapshot, SnapshotTooNew, SnapshotDamaged, OSError."""
    content = path.read_bytes()
    if content[: len(_MAGIC)] != _MAGIC[: len(content)] or not content:
        raise NotASnapshot(path)
    if len(content) < _HEADER.size:
        raise SnapshotDamaged(path, "it ends within its header")
    _, version, length, digest = _HEADER.unpack_from(content)
    if version > _VERSION:
        raise SnapshotTooNew(path, version)
    payload = memoryview(content)[_HEADER.size :]
    if len(payload) != length:
        raise SnapshotDamaged(path, f"{len(payload)} bytes follow its header, not {length}")
    if hashlib.sha256(payload).digest() != digest:
        raise SnapshotDamaged(path, "its bytes are not those that were written")
    try:
        _rebuild(msgspec.msgpack.decode(payload, type=_File), tree, sources)
        check.prove(tree, sources)
    except InvariantViolated as error:
        raise SnapshotDamaged(path, error.law) from None
    except (msgspec.MsgspecError, RecursionError, LookupError, ValueError, TypeError, ArithmeticError):
        raise SnapshotDamaged(path, "what it holds is no index") from None


# -- writing


def _source(source: Source) -> _Source:
    worker, rank = source.publisher
    groups = [_Group(each.index, each.kind, each.window, each.block_size) for each in source.groups.values()]
    holders = [
        _Holder(size, [(name, _bytes(planes)) for name, planes in each.loose.items()], each.resident)
        for size, each in source.holders.items()
    ]
    return _Source(_plain(worker), rank, source.counts, groups, holders)


def _plain(worker: Hashable) -> Any:
    if isinstance(worker, tuple):
        return [_plain(each) for each in worker]
    if worker is None or type(worker) in (bool, int, float, str, bytes):
        return worker
    instead = "use ids made of None, bool, int, float, str, bytes and tuples"
    raise Unsupported(f"saving a worker id of type {type(worker).__name__}", instead)


def _runs(tree: PrefixTree, sources: Sources) -> list[_Run]:
    holders = [holder for source in sources.values() for holder in source.holders.values()]
    numbers: dict[Owner, int] = {holder: number for number, holder in enumerate(holders)}
    places: dict[Node, int] = {}
    rows = []
    for root, run in tree.runs():
        places[run] = len(places)
        layers = {numbers[holder]: _layers(first) for holder, first in run.holders.items()}
        above = places.get(run.parent, -1)
        rows.append(_Run(above, root.adapter, root.block_bytes, run.extra, bytes(run.tokens), layers))
    return rows


def _layers(first: Holding) -> list[_Layer]:
    """The first names of the blocks, the second ones, and so on."""
    layers = [_Layer(first.names, {plane: _bytes(mask) for plane, mask in first.masks.items()})]
    if first.more is None:
        return layers
    rows: dict[int, list[tuple[Hash, int]]] = {}
    for name, (place, planes) in first.more.names.items():
        rows.setdefault(place, []).append((name, planes))
    for number in range(max(map(len, rows.values()))):
        names: list[Hash | None] = []
        masks: dict[Plane, int] = {}
        for place, row in sorted(rows.items()):
            if number < len(row):
                name, planes = row[number]
                names += [*[None] * (place - len(names)), name]
                for plane in planes_of(planes):
                    masks[plane] = masks.get(plane, 0) | 1 << place
        layers.append(_Layer(names, {plane: _bytes(mask) for plane, mask in masks.items()}))
    return layers


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


# -- reading


def _rebuild(file: _File, tree: PrefixTree, sources: Sources) -> None:
    holders: list[Holder] = []
    for row in file.sources:
        publisher = Publisher(_hashable(row.worker), row.rank)
        source = sources[publisher] = Source(publisher, tree)
        source.counts = row.counts
        for saved in row.holders:
            holder = source.holder(saved.block_size)
            holder.loose = {name: int.from_bytes(planes, "little") for name, planes in saved.loose}
            holder.resident = saved.resident
            holders.append(holder)
        for group in row.groups:
            source.add_group(group.index, group.kind, group.window, group.block_size)
    runs: list[Run] = []
    for each in file.runs:
        parent = tree.root(each.adapter, each.block_bytes) if each.parent < 0 else runs[each.parent]
        run = tree.add(parent, each.extra, each.tokens, each.block_bytes)
        runs.append(run)
        for number, layers in each.holders.items():
            _rebuild_holding(run, holders[number], layers)


def _rebuild_holding(run: Run, holder: Holder, layers: list[_Layer]) -> None:
    first = run.holders[holder] = Holding(run)
    first.names = layers[0].names
    first.masks = {plane: int.from_bytes(mask, "little") for plane, mask in layers[0].masks.items()}
    holder.names.update((name, first) for name in first.names if name is not None)
    for saved in layers[1:]:
        masks = {plane: int.from_bytes(mask, "little") for plane, mask in saved.masks.items()}
        if not all(0 <= plane < PLANES_MAX for plane in masks):
            raise ValueError("a plane that no group has")
        for place, name in enumerate(saved.names):
            if name is not None:
                planes = sum(1 << plane for plane, mask in masks.items() if mask >> place & 1)
                holder.names[name] = first.add_alias(name, place, planes)
    if isinstance(run.parent, Run):
        run.parent.holders[holder].children += 1


def _hashable(worker: Any) -> Hashable:
    return tuple(map(_hashable, worker)) if isinstance(worker, list) else worker
