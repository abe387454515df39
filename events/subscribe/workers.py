"""The state of workers with recorded feeds: a fold over the events of a log of kind `feed`.

`from_wire` and `to_wire` convert between vLLM's KV events and those of the log; nothing is lost but the order of a
map's keys, and the difference between a missing value and nil. Fields that a store has for all its blocks are kept once
(`Scope`), the others per block. In sliding windows a store may name fewer blocks than its tokens make, and it is not
known which: then its tokens stay with all of its blocks.

Engines may store a block again while it is resident, and remove each copy: copies are counted, and the block is
resident until the last one is gone. After a loss only blocks stored since are known to be resident. A block in flight
between levels is resident nowhere for a moment; it is kept as long as a resident block follows it (`Lineage`), so that
a reader that joins at that moment can place those blocks.

`WorkerFeed` is the feed of one worker for routers: its own events, without copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple, cast

import msgspec

from events import types as ev
from events.errors import EventsError
from events.feed.cache_fold import StreamFold
from events.feed.changes import AnyChange, Cleared, EncodedEvent
from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Unknown, VLLMEvent
from events.packed import TOKEN_BYTES
from events.types import FeedRemoved, FeedStored, Hash, WorkerSeen

CacheChangeEvent = FeedStored | FeedRemoved | ev.FeedCleared | ev.FeedUnknown
_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
_EXTRA_FIELDS = (
    "extra_keys",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "session_id",
    "lookahead_token_ids",
    "cache_salt",
)


def from_wire(worker: int, event: VLLMEvent) -> CacheChangeEvent:
    """Convert a worker's event on the wire to an event of the log."""
    if isinstance(event, BlockStored):
        return _stored(worker, event)
    if isinstance(event, BlockRemoved):
        return FeedRemoved(
            worker=worker,
            block_hashes=event.block_hashes,
            medium=event.medium,
            group_idx=event.group_idx,
            locality=event.locality,
            ownership=event.ownership,
            more=_pack(event.more) if event.more else b"",
        )
    if isinstance(event, Unknown):
        return ev.FeedUnknown(worker=worker, name=event.name)
    assert isinstance(event, AllBlocksCleared)
    return ev.FeedCleared(worker)


def _stored(worker: int, event: BlockStored) -> FeedStored:
    more = {name: value for name in _EXTRA_FIELDS if (value := getattr(event, name)) is not None}
    try:
        tokens = array("i", cast("tuple[int, ...]", event.token_ids)).tobytes()
    except (TypeError, OverflowError):
        tokens = b""
        more["token_ids"] = event.token_ids
    if event.more:
        more = event.more | more
    return FeedStored(
        worker=worker,
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        tokens=tokens,
        block_size=event.block_size,
        medium=event.medium,
        group_idx=event.group_idx,
        lora_id=event.lora_id,
        lora_name=event.lora_name,
        locality=event.locality,
        ownership=event.ownership,
        more=_pack(more) if more else b"",
    )


def to_wire(event: FeedStored | FeedRemoved) -> bytes:
    """Encode the event as one of vLLM's msgpack maps: all fields that vLLM always has, and others with a value."""
    fields: dict[str, Any] = {"block_hashes": event.block_hashes}
    if isinstance(event, FeedStored):
        fields["parent_block_hash"] = event.parent_block_hash
        fields["token_ids"] = array("i", event.tokens).tolist()
        fields |= {name: getattr(event, name) for name in ("block_size", "lora_id", "medium", "lora_name")}
    else:
        fields["medium"] = event.medium
    for name in ("group_idx", "locality", "ownership"):
        if (value := getattr(event, name)) is not None:
            fields[name] = value
    more = _unpack(event.more) if event.more else {}
    return _pack({"type": f"Block{type(event).__name__.removeprefix('Feed')}", **fields, **more})


PER_BLOCK = ("extra_keys", "lookahead_token_ids")
"""Further fields with an entry for each block."""
SLIDING_KINDS = ("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention")
"""Kinds of attention with a limited view, as engines name them."""
ODD_TOKENS = "token_ids"
"""The further field for tokens that are no plain numbers."""

_Own = tuple[tuple[str, Any], ...]


class Scope(NamedTuple):
    """Fields common to all blocks of a store: the event without the columns per block."""

    event: FeedStored
    whole: bool
    """True if the tokens are in it as well, because it is not known which belong to which block."""
    chained: bool = True
    """True if a block is useless without its parent, as with full attention."""


class WorkerBlock(NamedTuple):
    """A resident block."""

    name: Hash
    parent: Hash | None
    tokens: bytes
    """int32 LE; empty if the engine did not publish them, or if `scope.whole`."""
    own: _Own
    """Values of the block in further fields of its engine's events."""
    scope: Scope

    def field(self, name: str) -> Any:
        """Return its entry of a further field, or the value common to all blocks; None: there is none."""
        for key, value in self.own:
            if key == name:
                return value
        more = self.scope.event.more
        return _unpack(more).get(name) if more else None


def blocks_of(event: FeedStored) -> list[WorkerBlock]:
    """Return the stored blocks, in order."""
    hashes, size = event.block_hashes, event.block_size
    more: dict[str, Any] = _unpack(event.more) if event.more else {}
    count = len(hashes)
    own = {name: more.pop(name) for name in PER_BLOCK if _has_each(more.get(name), count)}
    aligned = not event.tokens or len(event.tokens) == count * size * TOKEN_BYTES
    if ODD_TOKENS in more and _has_each(more[ODD_TOKENS], count * size) and size:
        odd = more.pop(ODD_TOKENS)
        own[ODD_TOKENS] = [odd[at * size : (at + 1) * size] for at in range(count)]
    whole = not aligned or ODD_TOKENS in more
    bare = msgspec.structs.replace(
        event,
        block_hashes=(),
        parent_block_hash=event.parent_block_hash if whole else None,
        tokens=event.tokens if whole else b"",
        more=_pack(more) if more else b"",
    )
    chained = not whole and more.get("kv_cache_spec_kind") not in SLIDING_KINDS
    scope, step = Scope(bare, whole, chained), size * TOKEN_BYTES if event.tokens and not whole else 0
    blocks, parent = [], event.parent_block_hash
    for at, name in enumerate(hashes):
        mine = tuple([(key, values[at]) for key, values in own.items()])
        blocks.append(WorkerBlock(name, parent, event.tokens[at * step : (at + 1) * step], mine, scope))
        parent = name
    return blocks


def _has_each(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def stores_of(blocks: Iterable[WorkerBlock]) -> Iterator[FeedStored]:
    """Yield events that store these blocks, in this order; consecutive blocks of one prefix in one event."""
    run: list[WorkerBlock] = []
    for block in blocks:
        if run and not _continues(run[-1], block):
            yield _store(run)
            run = []
        run.append(block)
    if run:
        yield _store(run)


def _continues(before: WorkerBlock, block: WorkerBlock) -> bool:
    if block.scope.whole or before.scope.whole:
        return block.scope is before.scope
    same = block.scope is before.scope or block.scope == before.scope
    return (
        same
        and block.parent == before.name
        and [key for key, _ in block.own] == [key for key, _ in before.own]
    )


def _store(run: Sequence[WorkerBlock]) -> FeedStored:
    scope = run[0].scope
    own: dict[str, list[Any]] = {}
    for block in run:
        for key, value in block.own:
            own.setdefault(key, []).extend(value if key == ODD_TOKENS else [value])
    more = scope.event.more
    if own:
        more = _pack({**own, **(_unpack(more) if more else {})})
    return msgspec.structs.replace(
        scope.event,
        block_hashes=tuple([block.name for block in run]),
        parent_block_hash=scope.event.parent_block_hash if scope.whole else run[0].parent,
        tokens=scope.event.tokens if scope.whole else b"".join([block.tokens for block in run]),
        more=more,
    )


def parents_first(blocks: Iterable[WorkerBlock]) -> Iterator[WorkerBlock]:
    """Yield the blocks in their order, but each after its parent, wherever in its group that is."""
    rows = list(blocks)
    at: dict[tuple[int, Hash], list[int]] = {}
    for row, block in enumerate(rows):
        at.setdefault((_group(block), block.name), []).append(row)
    met, yielded = bytearray(len(rows)), bytearray(len(rows))
    for first in range(len(rows)):
        path = [first]
        while path:
            row = path[-1]
            block = rows[row]
            if not met[row]:
                met[row] = True
                parents = () if block.parent is None else at.get((_group(block), block.parent), ())
                path += [each for each in parents if not met[each]]
                continue
            path.pop()
            if not yielded[row]:
                yielded[row] = True
                yield block


def _group(block: WorkerBlock) -> int:
    return block.scope.event.group_idx or 0


Key = tuple[int, Hash]
"""Group and name."""


class Lineage:
    """Children of each block, resident or kept."""

    def __init__(self) -> None:
        self._children: dict[Key, int] = {}
        self.kept: dict[Key, WorkerBlock] = {}
        """Kept blocks in the order in which they left."""

    def add(self, group: int, block: WorkerBlock) -> None:
        """Count one more place of residence."""
        if not block.scope.chained:
            return
        if block.parent is not None:
            self._children[group, block.parent] = self._children.get((group, block.parent), 0) + 1
        back = self.kept.pop((group, block.name), None)
        if back is not None:
            self._release(group, back)

    def take(self, group: int, block: WorkerBlock, *, is_last: bool) -> None:
        """Count one place of residence less; `is_last`: it is now resident nowhere in its group."""
        if not block.scope.chained:
            return
        if is_last and (group, block.name) in self._children:
            self.kept[group, block.name] = block
        else:
            self._release(group, block)

    def clear(self) -> None:
        """Remove everything."""
        self._children.clear()
        self.kept.clear()

    def _release(self, group: int, block: WorkerBlock) -> None:
        """Unlink it from its parent, which may have been kept for it alone."""
        gone: WorkerBlock | None = block
        while gone is not None and gone.parent is not None:
            key = (group, gone.parent)
            left = self._children[key] - 1
            if left:
                self._children[key] = left
                return
            del self._children[key]
            gone = self.kept.pop(key, None)


GPU = "GPU"
MOST_COPIES = 100
"""Counted copies of one block in one place: further ones are ignored."""


class BlockPlace(NamedTuple):
    """A place of blocks, as the engine names it; a removal has to name the same."""

    medium: str
    group: int
    locality: str | None = None
    ownership: str | None = None


def place_of(event: FeedStored | FeedRemoved) -> BlockPlace:
    """Return the place of an event's blocks: without a medium the GPU, without a group the first one."""
    return BlockPlace(event.medium or GPU, event.group_idx or 0, event.locality, event.ownership)


def name_of(seen: WorkerSeen) -> str:
    """Return a worker's display name: its address, and its rank unless it is the first one."""
    return f"{seen.source}#{seen.rank}" if seen.rank else seen.source


@dataclass
class WorkerState:
    """The known state of one engine, or of one of its data-parallel ranks."""

    seen: WorkerSeen
    complete: bool = True
    """True if all its resident blocks are known."""
    number: int | None = None
    """Number of the last batch."""
    published_ts: int | None = None
    """Time at which that was published, by the worker's clock."""
    blocks: dict[BlockPlace, dict[Hash, WorkerBlock]] = field(default_factory=dict)
    copies: dict[tuple[BlockPlace, Hash], int] = field(default_factory=dict)
    """Copies of blocks that have several."""
    lineage: Lineage = field(default_factory=Lineage)
    batches: int = 0
    gaps: int = 0
    lost: int = 0
    """Batches lost in these."""
    restarts: int = 0
    clears: int = 0
    stored: int = 0
    removed: int = 0
    repeated: int = 0
    """Blocks stored while resident."""
    unknown_removals: int = 0
    """Blocks removed that were not known to be there: after a loss, this is expected."""
    unknown_events: int = 0

    @property
    def name(self) -> str:
        """The display name."""
        return name_of(self.seen)

    @property
    def num_blocks(self) -> int:
        """Resident blocks, each counted once for each of its places."""
        return sum(map(len, self.blocks.values()))

    def store(self, event: FeedStored) -> list[WorkerBlock]:
        """Add the blocks; return those that were not resident there before."""
        place = place_of(event)
        there = self.blocks.setdefault(place, {}) if event.block_hashes else {}
        new = []
        for block in blocks_of(event):
            if block.name in there:
                self.repeated += 1
                self.copies[place, block.name] = min(self.copies.get((place, block.name), 1) + 1, MOST_COPIES)
            else:
                there[block.name] = block
                self.lineage.add(place.group, block)
                new.append(block)
        self.stored += len(event.block_hashes)
        return new

    def remove(self, event: FeedRemoved) -> list[Hash]:
        """Remove a copy of each; return those that are no longer resident there."""
        place = place_of(event)
        there = self.blocks.get(place, {})
        gone = []
        for name in event.block_hashes:
            left = self.copies.pop((place, name), 1) - 1
            if left > 1:
                self.copies[place, name] = left
            elif not left and (block := there.pop(name, None)) is not None:
                self.lineage.take(place.group, block, is_last=not self._has(place.group, name))
                gone.append(name)
            elif not left:
                self.unknown_removals += 1
        if not there:
            self.blocks.pop(place, None)
        self.removed += len(event.block_hashes)
        return gone

    def _has(self, group: int, name: Hash) -> bool:
        return any(place.group == group and name in there for place, there in self.blocks.items())

    def forget(self) -> None:
        """Remove all resident blocks."""
        self.blocks.clear()
        self.copies.clear()
        self.lineage.clear()

    def resident(self) -> Iterator[FeedStored | FeedRemoved]:
        """Yield events that make the current resident blocks; later changes do not affect them.

        They are stores, parents first. Children of a block that is temporarily absent come with that block, which is
        removed again at the end.
        """
        blocks = [block for there in self.blocks.values() for block in there.values()]
        kept = [*self.lineage.kept.values()]
        return chain(stores_of(parents_first(blocks + kept)), _removals(kept))

    def copied(self) -> Iterator[FeedStored]:
        """Yield stores of the further copies of these blocks: of all that have a second one, a third, …"""
        return stores_of(
            self.blocks[place][name]
            for number in range(1, max(self.copies.values(), default=1))
            for (place, name), count in self.copies.items()
            if count > number
        )


def _removals(blocks: Iterable[WorkerBlock]) -> Iterator[FeedRemoved]:
    """Yield removals, deepest blocks first."""
    for block in reversed(list(parents_first(blocks))):
        event = block.scope.event
        yield FeedRemoved(
            worker=event.worker,
            block_hashes=(block.name,),
            medium=event.medium,
            group_idx=event.group_idx,
            locality=event.locality,
            ownership=event.ownership,
        )


class FeedState:
    """All workers of a log."""

    def __init__(self) -> None:
        self.epoch = 0
        self.started: ev.FeedStarted | None = None
        self.tokens_recorded = True
        self.workers: dict[int, WorkerState] = {}
        """Workers of this epoch, by number."""

    def apply(self, event: ev.AnyEvent) -> None:
        """Apply one event; events of other kinds of logs change nothing. Raises KeyError for an unknown worker."""
        match event:
            case FeedStored():
                self.store(event)
            case FeedRemoved():
                self.remove(event)
            case ev.FeedReceived():
                worker = self.workers[event.worker]
                worker.number, worker.published_ts = event.number, event.published_ts
                worker.batches += 1
            case ev.FeedCleared() | ev.FeedGap() | ev.FeedRestarted():
                self._forget(event)
            case WorkerSeen():
                worker = self.workers.setdefault(event.worker, WorkerState(event))
                worker.seen, worker.complete = event, event.complete
            case ev.FeedUnknown():
                self.workers[event.worker].unknown_events += 1
            case ev.FeedStarted():
                self.started = event
                self.workers.clear()
            case ev.EpochStarted():
                self.epoch, self.tokens_recorded = event.epoch, event.tokens_recorded

    def store(self, event: FeedStored) -> list[WorkerBlock]:
        """Apply a store; return the blocks that become resident."""
        return self.workers[event.worker].store(event)

    def remove(self, event: FeedRemoved) -> list[Hash]:
        """Apply a removal; return the hashes that are no longer resident."""
        return self.workers[event.worker].remove(event)

    def _forget(self, event: ev.FeedCleared | ev.FeedGap | ev.FeedRestarted) -> None:
        worker = self.workers[event.worker]
        worker.forget()
        worker.complete = not isinstance(event, ev.FeedGap)
        if isinstance(event, ev.FeedGap):
            worker.gaps += 1
            worker.lost += event.last - event.first + 1
        elif isinstance(event, ev.FeedRestarted):
            worker.restarts += 1
        else:
            worker.clears += 1


class SeveralWorkers(EventsError):
    """A feed needs one worker, and the log has several."""


class WorkerFeed(StreamFold[AnyChange]):
    """Folds batches into the changes of the worker with this name; None: of the only worker.

    `fold` raises SeveralWorkers.
    """

    _handled_when_lost = (ev.Gap, ev.FeedStarted, WorkerSeen)

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.worker: WorkerState | None = None
        self._name = name
        self._names: dict[int, str] = {}
        changes: tuple[type, ...] = (FeedStored, FeedRemoved, ev.FeedCleared, ev.FeedGap, ev.FeedRestarted)
        self._handlers |= {ev.FeedStarted: self._start, WorkerSeen: self._see}
        self._handlers |= dict.fromkeys(changes, self._apply_change)

    def snapshot(self) -> Iterator[AnyChange]:
        """Yield all known resident blocks, as stores, parents first; later folds do not affect it."""
        if self.worker is None:
            return iter(())
        return map(_encode_event, self.worker.resident())

    @property
    def missing(self) -> str | None:
        """Return a text naming the worker that is not in the log (yet); None: it is there."""
        if self.worker is not None:
            return None
        if self._name is None:
            return "the log contains no worker yet"
        names = ", ".join(sorted(self._names.values())) or "none"
        return f"the log does not contain worker {self._name}; it has {names}"

    def _apply_change(
        self, event: FeedStored | FeedRemoved | ev.FeedCleared | ev.FeedGap | ev.FeedRestarted
    ) -> None:
        """Apply an event of some worker."""
        worker = self.worker
        if worker is None or event.worker != worker.seen.worker:
            return
        if isinstance(event, FeedStored):
            new = worker.store(event)
            if len(new) == len(event.block_hashes):
                self._changes += [_encode_event(event)] if new else []
            else:
                self._changes += map(_encode_event, stores_of(new))
        elif isinstance(event, FeedRemoved):
            if gone := worker.remove(event):
                self._changes.append(_encode_event(msgspec.structs.replace(event, block_hashes=tuple(gone))))
        else:
            worker.forget()
            self._changes.append(Cleared())

    def _start(self, event: ev.FeedStarted) -> None:
        self._begin()
        self.worker = None
        self._names.clear()
        self._changes.append(Cleared())

    def _see(self, event: WorkerSeen) -> None:
        self._names[event.worker] = name_of(event)
        if self._name is None and len(self._names) > 1:
            names = ", ".join(sorted(self._names.values()))
            raise SeveralWorkers(
                f"the log has several workers, but a feed is of one: choose it with engine=; it has {names}"
            )
        if self._name in (None, self._names[event.worker]):
            if self.worker is None:
                self.worker = WorkerState(event)
            elif self.worker.seen.worker == event.worker:
                self.worker.seen = event


def _encode_event(event: FeedStored | FeedRemoved) -> EncodedEvent:
    return EncodedEvent(to_wire(event))


class Prefix(NamedTuple):
    """The part of a prompt resident in one worker."""

    worker: WorkerState
    tokens: int
    blocks: int
    media: dict[str, int]
    """Number of blocks by the best place of each, in the worker's own terms."""


def longest_prefixes(
    workers: Iterable[WorkerState], tokens: bytes, *, lora: str | None = None, salt: str | None = None
) -> list[Prefix]:
    """Return the resident prefix per worker, longest first; `tokens` (int32 LE) may match up to the last one."""
    found = [_longest(worker, tokens, lora, salt) for worker in workers]
    return sorted(found, key=lambda prefix: -prefix.tokens)


def _longest(worker: WorkerState, tokens: bytes, lora: str | None, salt: str | None) -> Prefix:
    groups: dict[int, list[tuple[str, WorkerBlock]]] = {}
    for place, there in worker.blocks.items():
        for block in there.values():
            groups.setdefault(place.group, []).append((place.medium, block))
    paths = [_path(blocks, tokens, lora, salt) for blocks in groups.values() if blocks[0][1].scope.chained]
    if not paths:
        return Prefix(worker, 0, 0, {})
    path = min(paths, key=lambda found: sum(size for _, size in found))
    media: dict[str, int] = {}
    for medium, _ in path:
        media[medium] = media.get(medium, 0) + 1
    return Prefix(worker, sum(size for _, size in path), len(path), media)


def _path(
    blocks: Iterable[tuple[str, WorkerBlock]], tokens: bytes, lora: str | None, salt: str | None
) -> list[tuple[str, int]]:
    """Return the medium and the tokens of each block from the prompt's beginning on."""
    children: dict[Hash | None, list[tuple[str, WorkerBlock]]] = {}
    for medium, block in blocks:
        if block.tokens:
            children.setdefault(block.parent, []).append((medium, block))
    path: list[tuple[str, int]] = []
    parent: Hash | None = None
    at = 0
    while True:
        here = [
            (medium, block)
            for medium, block in children.get(parent, ())
            if tokens[at : at + len(block.tokens)] == block.tokens
            and _suits(block, lora, salt if not at else None)
        ]
        if not here:
            return path
        medium, block = min(here, key=lambda found: found[0] != "GPU")
        path.append((medium, len(block.tokens) // TOKEN_BYTES))
        at, parent = at + len(block.tokens), block.name


def _suits(block: WorkerBlock, lora: str | None, salt: str | None) -> bool:
    """Return True if a prompt with this adapter and, at its beginning, this salt may use the block.

    Engines publish a salt in clear, or as its SHA-256 in hex. Other extra keys of a block's hash (images) match no
    prompt of plain tokens.
    """
    event = block.scope.event
    adapter = event.lora_name if event.lora_name is not None or event.lora_id is None else str(event.lora_id)
    if adapter != lora:
        return False
    extra = [key for key in block.field("extra_keys") or () if key != adapter]
    unmatched = extra or (
        [block.field("cache_salt")] if block.parent is None and block.field("cache_salt") else []
    )
    if salt is None:
        return not unmatched
    return len(unmatched) == 1 and unmatched[0] in (salt, sha256(salt.encode()).hexdigest())
