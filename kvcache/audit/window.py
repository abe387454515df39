"""What the log says of each content in one attention window: where it is cached, or what became of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY, GroupCreated
from kvcache.audit.columns import Columns, Ids
from kvcache.audit.reasons import Reason

NOWHERE = -1
"""As a level: not cached. As a content: a slot that has none."""


class Window:
    """One group of the log. Rows are contents (`ContentIds`), times are wall-clock ns."""

    def __init__(self, created: GroupCreated) -> None:
        self.created = created
        self.slots: tuple[npt.NDArray[np.int64], ...] = tuple(
            np.full(size, NOWHERE, np.int64) for size in created.num_blocks
        )
        """Per level: the content of each slot."""
        self.of = Columns(
            level=(np.int8, NOWHERE),
            seen=(np.int8, 0),
            why=(np.int8, 0),
            stored_by=(np.int32, -1),
            stored_batch=(np.int64, -1),
            stored_at=(np.int64, 0),
            used_at=(np.int64, 0),
            uses=(np.int32, 0),
            served=(np.int32, 0),
            holders=(np.int32, 0),
            priority=(np.int8, 0),
            gone_batch=(np.int64, -1),
            gone_at=(np.int64, 0),
            gone_by=(np.int32, -1),
        )
        """Per content: where it is cached; whether it ever was; `Reason` for which it went, when, and for whose room;
        who stored it when; its last use; how often it was reused since it was stored, and in all; how many sequences
        and pins hold it; its priority. Requests are numbered as they come (`Running.number`)."""

    def left_behind(self, reused: int, tokens_per_block: int) -> int:
        """The leading blocks that a request which reuses so many tokens never needs."""
        if self.created.kind != "sliding":
            return 0
        return min(max(0, reused - self.created.window + 1), reused) // tokens_per_block

    def contents(self, level: int, slots: bytes) -> Ids:
        """What lies in these slots; NOWHERE for blocks that are not full, or not cached."""
        return self.slots[level][np.frombuffer(slots, np.int32)].astype(np.intp)

    def store(
        self, ids: Ids, slots: npt.NDArray[np.int32], level: int, priority: int, by: int, batch: int, now: int
    ) -> None:
        """Contents are cached from now on."""
        of = self.of
        of.reach(int(ids.max(initial=-1)) + 1)
        self.slots[level][slots] = ids
        of["level"][ids], of["seen"][ids], of["priority"][ids] = level, 1, priority
        of["stored_by"][ids], of["stored_batch"][ids] = by, batch
        of["stored_at"][ids] = of["used_at"][ids] = now
        of["uses"][ids] = of["holders"][ids] = 0

    def restore(
        self, ids: Ids, slots: npt.NDArray[np.int32], level: int, priority: int, batch: int, now: int
    ) -> None:
        """Contents are cached, as an exported state of this batch says: those that were until then live on, of others
        nothing is known from before.
        """
        of = self.of
        of.reach(int(ids.max(initial=-1)) + 1)
        lost_now = (of["gone_batch"][ids] == batch) & (of["why"][ids] == Reason.RESTARTED)
        new = ids[~lost_now]
        of["stored_by"][new], of["stored_batch"][new], of["uses"][new] = -1, batch, 0
        of["stored_at"][new] = of["used_at"][new] = now
        self.slots[level][slots] = ids
        of["level"][ids], of["seen"][ids], of["priority"][ids], of["holders"][ids] = level, 1, priority, 0

    def move(self, from_level: int, from_slots: bytes, to_level: int, to_slots: bytes) -> None:
        """Contents lie elsewhere from now on."""
        ids = self.contents(from_level, from_slots)
        self.slots[from_level][np.frombuffer(from_slots, np.int32)] = NOWHERE
        self.slots[to_level][np.frombuffer(to_slots, np.int32)] = ids
        self.of["level"][ids[ids >= 0]] = to_level

    def remove(
        self, level: int, slots: bytes, by: int, batch: int, now: int, *, invalid: bool = False
    ) -> Ids:
        """Contents are gone; returns them."""
        ids = self.contents(level, slots)
        self.slots[level][np.frombuffer(slots, np.int32)] = NOWHERE
        ids = ids[ids >= 0]
        why = Reason.INVALIDATED if invalid else Reason.EVICTED if level == PRIMARY else Reason.DROPPED
        self._lose(ids, why, by, batch, now)
        return ids

    def remove_all(self, why: Reason, batch: int, now: int) -> Ids:
        """Nothing is cached any more; returns what was."""
        ids = np.flatnonzero(self.of["level"] != NOWHERE)
        self._lose(ids, why, NOWHERE, batch, now)
        for slots in self.slots:
            slots.fill(NOWHERE)
        return ids

    def _lose(self, ids: Ids, why: Reason, by: int, batch: int, now: int) -> None:
        of = self.of
        of["level"][ids], of["why"][ids] = NOWHERE, why
        of["gone_by"][ids], of["gone_batch"][ids], of["gone_at"][ids] = by, batch, now

    def hold(self, ids: Ids) -> None:
        """One more sequence holds contents."""
        self.of["holders"][ids] += 1

    def release(self, ids: Ids, now: int) -> None:
        """One sequence fewer holds contents."""
        self.of["holders"][ids] -= 1
        self.of["used_at"][ids] = now

    def reuse(self, ids: Ids, now: int) -> None:
        """A request reuses contents."""
        for name in ("uses", "served"):
            self.of[name][ids] += 1
        self.of["used_at"][ids] = now
