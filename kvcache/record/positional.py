"""What a `Recorder` is told of groups of layers that share the pool of the one with full attention."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

from events import types as ev
from events.types import CHUNKED, SLIDING, UNCACHED, RemoveReason, RequestId
from kvcache.errors import Contradiction, UsageError, shown
from kvcache.fold.positional import KINDS, MOST_TOKENS, PositionalGroup
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.guard import Guard, exclusive
from kvcache.inputs.arguments import (
    checked_choice,
    checked_integer,
    checked_natural,
    checked_request_id,
    listed,
)
from kvcache.record.block_ids import BlockIds, Blocks, listed_blocks
from kvcache.record.mirror import Mirror

Kind = Literal["full", "sliding", "chunked", "state", "uncached"]
_WINDOWS = (SLIDING, CHUNKED)


class LayerGroup(NamedTuple):
    """Layers whose blocks lie in the pool of the layers with full attention."""

    kind: Kind
    """What of a prefix must be cached so that these layers can go on behind it: ``full``, all of it; ``sliding``, its
    last `window` tokens; ``chunked``, what follows the last multiple of `window`; ``state``, its end; ``uncached``,
    nothing, as nothing of theirs is found."""
    tokens_per_block: int
    window: int = 0
    """In tokens."""
    layers: int = 0
    """How many, for people."""


def pool_shared(groups: Items[LayerGroup], *, named: bool) -> ev.PoolShared | None:
    """The event for these groups; None: there are none. Raises `UsageError`. `named`: the engine names its blocks."""
    shared = [_checked(each) for each in listed(groups, "groups")]
    if shared and not named:
        raise UsageError("further groups are told by the engine's own names: give name_bytes")
    return ev.PoolShared(tuple(shared)) if shared else None


def _checked(group: object) -> ev.SharingGroup:
    if not isinstance(group, LayerGroup):
        raise UsageError(f"groups must be LayerGroups, not {type(group).__name__}")
    if group.kind not in KINDS:
        raise UsageError(f"a group must be one of {', '.join(KINDS)}")
    size, window = (
        checked_natural(group.tokens_per_block, "tokens_per_block"),
        checked_natural(group.window, "window"),
    )
    if not size or (not window and group.kind in _WINDOWS):
        raise UsageError("a group needs tokens_per_block, and one that slides or is chunked a window")
    return ev.SharingGroup(group.kind, size, window, checked_natural(group.layers, "layers"))


class PositionalCalls:
    """The calls of a `Recorder` about further groups. Each of these has a number from 1 on."""

    state: CacheState
    _emit: Callable[[ev.Event], None]
    _guard: Guard
    _ids: BlockIds
    _mirror: Mirror
    _key_bytes: int

    @exclusive
    def taken(
        self, request_id: RequestId, indices: Items[int], blocks: Blocks, *, group: int, reused: bool = False
    ) -> None:
        """A request has these blocks in its table of a group, at these indices, in each of which it had none.

        They are free ones or, if `reused`, have names there by which they were found.
        """
        into, sequence = self._positional(group), self._mirror.sequence(request_id)
        ids = listed_blocks(blocks)
        slots, at = self._ids.slots(ids), self._indices(indices, len(ids))
        if not slots:
            return
        table = into.tables.get(sequence.handle, {})
        for index in at:
            if index in table:
                raise self._wrong(sequence, f"has a block at {index} already, in group {group}")
        if len(set(at)) != len(at):
            raise UsageError("a call names an index twice")
        if reused:
            for block, slot, index in zip(ids, slots, at, strict=True):
                if not into.ends_in(slot, index):
                    raise self._wrong(
                        sequence, f"reuses block {block} at {index}, which has no name there", block
                    )
        else:
            self._mirror.refuse_taken(ids, slots, sequence.request_id)
        with self._guard:
            self._emit(
                ev.SlotsTaken(
                    handle=sequence.handle,
                    group=into.index,
                    indices=at.tobytes(),
                    slots=slots.tobytes(),
                    reused=reused,
                )
            )

    @exclusive
    def left(self, request_id: RequestId, indices: Items[int], *, group: int) -> None:
        """A request let go of what it had at these indices of a group: no token to come needs it.

        What has a name can be found still; the others are free. A request that has `ended` has let go of all.
        """
        of, sequence = self._positional(group), self._mirror.sequence(request_id)
        table, at = of.tables.get(sequence.handle, {}), self._indices(indices)
        slots = array("i")
        for index in at:
            if index not in table:
                raise self._wrong(sequence, f"has no block at {index}, in group {group}")
            slots.append(table[index])
        if len(set(at)) != len(at):
            raise UsageError("a call names an index twice")
        if at:
            with self._guard:
                self._emit(
                    ev.SlotsLeft(
                        handle=sequence.handle, group=of.index, indices=at.tobytes(), slots=slots.tobytes()
                    )
                )

    @exclusive
    def named(
        self,
        request_id: RequestId,
        blocks: Blocks,
        names: bytes | Items[bytes],
        positions: Items[int],
        *,
        group: int,
    ) -> None:
        """These blocks of a request can be found, each by the name of the request's first `positions` tokens.

        Their content is written, or will be by the step that is about to run. A block can have several names.
        """
        of, sequence = self._positional(group), self._mirror.sequence(request_id)
        if of.created.kind == UNCACHED:
            raise UsageError(f"nothing of group {group} is found")
        ids = listed_blocks(blocks)
        slots, at = self._ids.slots(ids), self._indices(positions, len(ids))
        keys, seen = self._keys(names, len(slots)), set[tuple[int, bytes]]()
        own = of.tables.get(sequence.handle, {}).values()
        for block, slot, key, position in zip(ids, slots, keys, at, strict=True):
            if slot not in own:
                raise self._wrong(
                    sequence, f"names block {block} of group {group}, which it has not got", block
                )
            if not 0 < position <= sequence.num_tokens:
                raise self._wrong(
                    sequence, f"has {sequence.num_tokens} tokens, and a name for {position}", block
                )
            if key in of.names.get(slot, {}) or (slot, key) in seen:
                raise self._wrong(sequence, f"gives block {block} a name that it has", block)
            seen.add((slot, key))
        if slots:
            with self._guard:
                self._emit(
                    ev.SlotsNamed(
                        handle=sequence.handle,
                        group=of.index,
                        slots=slots.tobytes(),
                        keys=b"".join(keys),
                        positions=at.tobytes(),
                    )
                )

    @exclusive
    def unnamed(
        self,
        blocks: Blocks,
        names: bytes | Items[bytes],
        request_id: RequestId | None = None,
        *,
        group: int,
        why: Literal["capacity", "superseded"] = "capacity",
    ) -> None:
        """These blocks cannot be found any more by these names, one for each: they make room, perhaps for a request.

        `superseded`: something else was written there.
        """
        of, reason = self._positional(group), checked_choice(why, RemoveReason, "why")
        ids = listed_blocks(blocks)
        slots = self._ids.slots(ids)
        keys, seen = self._keys(names, len(slots)), set[tuple[int, bytes]]()
        handle = None if request_id is None else self._mirror.sequence(request_id).handle
        for block, slot, key in zip(ids, slots, keys, strict=True):
            if key not in of.names.get(slot, {}) or (slot, key) in seen:
                raise Contradiction(
                    f"block {block} loses a name in group {group} that it has not got", block=int(block)
                )
            seen.add((slot, key))
        if slots:
            with self._guard:
                self._emit(
                    ev.SlotsUnnamed(
                        group=of.index, slots=slots.tobytes(), keys=b"".join(keys), why=reason, handle=handle
                    )
                )

    @exclusive
    def deferred(self, request_id: RequestId, *, group: int) -> None:
        """A request waits for a step, since another one only writes by then what it has found in a group."""
        of = self._positional(group)
        with self._guard:
            self._emit(ev.HitDeferred(request_id=checked_request_id(request_id), group=of.index))

    def _positional(self, group: int) -> PositionalGroup:
        groups, first = self.state.positional, len(self.state.groups)
        if not first <= checked_integer(group, "group") < first + len(groups):
            raise UsageError(f"there is no further group {group}")
        return groups[group - first]

    def _indices(self, numbers: Items[int], count: int | None = None) -> array[int]:
        row = [checked_natural(each, "an index or position") for each in listed(numbers, "indices")]
        if max(row, default=0) > MOST_TOKENS:
            raise UsageError(f"an index or position must be at most {MOST_TOKENS}")
        at = array("I", row)
        if count is not None and len(at) != count:
            raise UsageError(f"{count} blocks are given, and {len(at)} numbers for them")
        return at

    def _keys(self, names: bytes | Items[bytes], count: int) -> list[bytes]:
        size = self._key_bytes
        joined = names if isinstance(names, bytes) else b"".join(listed(names, "names"))
        if len(joined) != count * size:
            raise UsageError(f"{count} names of {size} bytes are needed, not {len(joined)} bytes")
        return [joined[at : at + size] for at in range(0, len(joined), size)]

    def _wrong(self, sequence: Sequence, told: str, block: object = None) -> Contradiction:
        number = {} if block is None else {"block": int(block)}  # type: ignore[call-overload]
        return Contradiction(f"request {shown(sequence.request_id)} {told}", sequence.request_id, **number)
