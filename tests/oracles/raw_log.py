"""What a log says by itself: lives and requests told from slots and handles, event by event, as slowly as it takes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from typing import Any

from events import types as ev
from events.packed import unpack_i32, unpack_i64
from events.types import EventBatch, MoveReason

Life = dict[str, Any]


class RawLog:
    """Follows slots, and knows no contents."""

    def __init__(self, batches: Iterable[EventBatch]) -> None:
        self.cached: dict[tuple[int, int, int], Life] = {}
        """By group, level and slot: full blocks, and those with fewer tokens."""
        self.blank: list[Counter[int]] = []
        """Per group: blank slots by level."""
        self.blank_after: dict[int, list[tuple[int, int]]] = {}
        self.lives: list[Life] = []
        self.requests: dict[int, dict[str, Any]] = {}
        """By handle."""
        self.totals: Counter[str] = Counter()
        self.removed: list[tuple[int, int, int, str, int]] = []
        self.failed = -1
        """The last batch in which a copy failed."""
        for batch in batches:
            for event in batch.events:
                handler = getattr(self, f"on_{type(event).__name__}", None)
                self.totals[type(event).__name__] += 1
                if handler is not None:
                    handler(event, batch.seq)
            self.blank_after[batch.seq] = [(each[0], each[1]) for each in self.blank]

    def full(self) -> list[Life]:
        """The lives of full blocks, those that are not over included."""
        return [life for life in [*self.lives, *self.cached.values()] if life["full"]]

    def on_CacheCreated(self, event: ev.CacheCreated, seq: int) -> None:  # noqa: N802
        self.size, self.windows = event.tokens_per_block, [group.window for group in event.groups]
        self.blank = [Counter(dict(enumerate(group.num_blocks))) for group in event.groups]

    def on_SequenceAdded(self, event: ev.SequenceAdded, seq: int) -> None:  # noqa: N802
        self.totals += Counter(prompt=event.num_tokens, reused=event.reused, partial=event.reused_partial)
        self.totals += Counter(primary=event.reused_primary[-1], secondary=event.reused_secondary[-1])
        self.requests[event.handle] = {"id": event.request_id, "admitted": seq, "ended": None, "out": 0}

    def on_SequenceRemoved(self, event: ev.SequenceRemoved, seq: int) -> None:  # noqa: N802
        self.requests[event.handle]["ended"] = seq
        for group, freed in enumerate(event.freed):
            self.blank[group][0] += len(freed) // 4

    def on_TokensAppended(self, event: ev.TokensAppended, seq: int) -> None:  # noqa: N802
        counts = array("I", event.counts) if event.counts else repeat(1)
        for handle, count in zip(unpack_i64(event.handles).tolist(), counts, strict=False):
            self.requests[handle]["out"] += count
            self.totals["output"] += count

    def on_BlocksAllocated(self, event: ev.BlocksAllocated, seq: int) -> None:  # noqa: N802
        self.blank[event.group][0] -= len(event.slots) // 4

    def on_BlocksDetached(self, event: ev.BlocksDetached, seq: int) -> None:  # noqa: N802
        self.blank[event.group][0] += len(event.freed) // 4

    def on_BlocksReused(self, event: ev.BlocksReused, seq: int) -> None:  # noqa: N802
        self.blank[event.group][0] += len(event.replaced) // 4
        for slot in unpack_i32(event.slots).tolist():
            self.cached[event.group, event.level, slot]["reused"] += not event.replaced

    def store(self, group: int, slot: int, seq: int, handle: int, priority: int, *, full: bool) -> None:
        assert (group, 0, slot) not in self.cached
        self.totals["stored"] += 1
        life = {"window": self.windows[group], "stored": seq, "by": self.requests[handle]["id"]}
        life |= {"priority": priority, "full": full, "reused": 0, "offloads": 0, "onboards": 0}
        self.cached[group, 0, slot] = life | {"gone": None, "why": None, "level": 0}

    def on_BlocksStored(self, event: ev.BlocksStored, seq: int) -> None:  # noqa: N802
        slots = unpack_i32(event.slots).tolist()
        for at, slot in enumerate(slots):
            full = at < len(slots) - 1 or event.last_tokens == self.size
            self.store(event.group, slot, seq, event.handle, event.priority, full=full)

    def on_BlocksFilled(self, event: ev.BlocksFilled, seq: int) -> None:  # noqa: N802
        for handle, slot in zip(unpack_i64(event.handles), unpack_i32(event.slots), strict=True):
            self.store(event.group, int(slot), seq, int(handle), event.priority, full=True)

    def on_BlocksUpdated(self, event: ev.BlocksUpdated, seq: int) -> None:  # noqa: N802
        for slot in unpack_i32(event.slots).tolist():
            self.cached[event.group, event.level, slot]["priority"] = event.priority

    def on_BlocksMoved(self, event: ev.BlocksMoved, seq: int) -> None:  # noqa: N802
        slots, to = unpack_i32(event.from_slots).tolist(), unpack_i32(event.to_slots).tolist()
        self.totals[event.why] += len(slots)
        self.blank[event.group][event.from_level] += len(slots)
        if event.why != MoveReason.RECOMPUTED:  # there it is the sequence's own
            self.blank[event.group][event.to_level] -= len(slots)
        lives = [self.cached.pop((event.group, event.from_level, slot)) for slot in slots]
        for slot, life in zip(to, lives, strict=True):
            self.cached[event.group, event.to_level, slot] = life
            life["level"] = event.to_level
            life["offloads"] += event.why == MoveReason.OFFLOAD
            life["onboards"] += event.why == MoveReason.ONBOARD

    def on_BlocksRemoved(self, event: ev.BlocksRemoved, seq: int) -> None:  # noqa: N802
        slots = unpack_i32(event.slots).tolist()
        self.totals["removed"] += len(slots)
        self.blank[event.group][event.level] += len(slots)
        self.removed.append((seq, self.windows[event.group], event.level, str(event.why), len(slots)))
        for slot in slots:
            life = self.cached.pop((event.group, event.level, slot))
            self.lives.append(life | {"gone": seq, "why": ("evicted", "dropped")[event.level], "level": None})

    def on_TransferFailed(self, event: ev.TransferFailed, seq: int) -> None:  # noqa: N802
        self.failed = seq

    def on_CacheCleared(self, event: ev.CacheCleared, seq: int) -> None:  # noqa: N802
        for group, counts in enumerate(event.removed):
            self.blank[group].update(dict(enumerate(counts)))
        self.totals["cleared"] += len(self.cached)
        why = "copy_failed" if self.failed == seq else "cleared"
        self.lives += [life | {"gone": seq, "why": why, "level": None} for life in self.cached.values()]
        self.cached.clear()
