"""How events change groups that share the pool of the first one, and the laws of such a pool."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from events import types as ev
from events.types import CHUNKED, PRIMARY, SLIDING, UNCACHED
from kvcache.errors import invariant
from kvcache.fold.contents import Contents
from kvcache.fold.encoder_fold import EncoderFold
from kvcache.fold.positional import KINDS, MOST_TOKENS, PositionalGroup


def export_shared(state: Contents) -> tuple[ev.PoolShared, ...]:
    """What stands behind the exported state of a cache whose groups share a pool; nothing for others."""
    return (ev.PoolShared(tuple([group.export() for group in state.positional])),) if state.positional else ()


def shared_slots(state: Contents) -> tuple[int, int]:
    """How many slots of the first group's primary pool further groups have: those held by sequences, and the others."""
    held = sum([len(group.holders) for group in state.positional])
    return held, sum([group.idle for group in state.positional])


def check_positional(state: Contents) -> None:
    """Prove that each slot of the shared pool is one group's, or free. Raises `InvariantViolated`."""
    seen: set[int] = set()
    blank = set(state.groups[0].levels[PRIMARY].blank) if state.positional else set()
    for group in state.positional:
        held = Counter([slot for table in group.tables.values() for slot in table.values()])
        invariant(held == group.holders, "the holders of a slot are counted wrongly")
        invariant(group.tables.keys() <= state.sequences.keys(), "a sequence has ended that has slots")
        invariant(all(group.tables.values()) and all(group.names.values()), "an empty row is kept")
        invariant(group.idle == len(group.names.keys() - held.keys()), "idle slots are counted wrongly")
        used = group.used()
        invariant(used <= blank, "a slot of the first group is used by another one, or there is no such slot")
        invariant(used.isdisjoint(seen), "two groups use a slot")
        seen |= used


class PositionalFold(EncoderFold):
    """Folds what groups that share a pool do. Only `CacheState.apply` calls what is here."""

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        if self.positional and event.group == 0:
            self._refuse_used(array("i", event.slots))
        super()._allocate(event)

    def _refuse_used(self, slots: array[int]) -> None:
        for group in self.positional:
            free = group.holders.keys().isdisjoint(slots) and group.names.keys().isdisjoint(slots)
            invariant(free, "a slot is taken that another group uses")

    def _share_pool(self, event: ev.PoolShared) -> None:
        assert self.created is not None
        invariant(
            len(event.groups) > 0 and self.created.key_bytes > 0,
            "a pool is shared by nobody, or without names",
        )
        self.positional = []
        for number, each in enumerate(event.groups, len(self.groups)):
            known = (
                each.kind in KINDS
                and 0 < each.tokens_per_block <= MOST_TOKENS
                and 0 <= each.window <= MOST_TOKENS
            )
            invariant(
                known and (each.kind not in (SLIDING, CHUNKED) or each.window > 0),
                "no such group shares a pool",
            )
            group = PositionalGroup(number, each, self.created.key_bytes)
            group.install(each)
            self.positional.append(group)
        check_positional(self)

    def _shared(self, index: int) -> PositionalGroup:
        at = index - len(self.groups)
        invariant(0 <= at < len(self.positional), "no such group shares a pool")
        return self.positional[at]

    def _take_slots(self, event: ev.SlotsTaken) -> None:
        group, slots = self._shared(event.group), array("i", event.slots)
        invariant(event.handle in self.sequences, "a sequence that does not run takes slots")
        rows = list(zip(array("I", event.indices), slots, strict=True))
        if event.reused:
            invariant(
                all(group.ends_in(slot, index) for index, slot in rows), "what is reused has no name there"
            )
        else:
            self._refuse_used(slots)
            invariant(
                self.groups[0].levels[PRIMARY].are_blank(slots), "a slot is taken that the first group uses"
            )
        group.take(event.handle, iter(rows))

    def _leave_slots(self, event: ev.SlotsLeft) -> None:
        rows = zip(array("I", event.indices), array("i", event.slots), strict=True)
        self._shared(event.group).leave(event.handle, rows)

    def _name_slots(self, event: ev.SlotsNamed) -> None:
        group = self._shared(event.group)
        invariant(group.created.kind != UNCACHED, "what nobody finds has a name")
        group.name(event)

    def _unname_slots(self, event: ev.SlotsUnnamed) -> None:
        self._shared(event.group).unname(event)

    def _end_positional(self, handle: int) -> None:
        for group in self.positional:
            group.end(handle)

    def _forget_positional_names(self) -> None:
        for group in self.positional:
            group.forget_names()


def add_positional(digest: Any, state: Contents) -> None:
    """Let all that these groups have enter a fingerprint."""
    for group in state.positional:
        has = group.export()
        for column in (has.named, has.keys, has.positions, has.handles, has.indices, has.slots):
            digest.update(column)
