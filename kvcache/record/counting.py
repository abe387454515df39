"""Counters fed by the event bus, and gauges read at each flush.

The engine's thread counts; other threads read the values published with the last flush. All counts are in one list,
first those of the whole and then those of one window after the other, since it is copied at every step.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from events import types as ev
from events.bus import EventBus
from events.packed import SLOT_BYTES
from events.types import PRIMARY, SECONDARY, MoveReason, Namespace, RequestId
from kvcache.fold.positional import shared_slots
from kvcache.fold.state import CacheState
from kvcache.stats import RequestStats, Stats

_FEW = 16
"""Up to this number of slots a loop is faster than numpy: it notes 16 in 1.6 µs, numpy in 2.5; 64 in 5.1 and in 2.8."""


class FirstUses:
    """Slots of each window that have never been allocated."""

    __slots__ = ("_fresh", "left")

    def __init__(self, sizes: Iterable[int]) -> None:
        self._fresh = [bytearray(b"\1") * size for size in sizes]
        self.left = [len(fresh) for fresh in self._fresh]
        """Number of these slots per window: 0 once all were taken, after which nothing is checked any more."""

    def take(self, group: int, slots: bytes) -> bytes:
        """Mark slots as taken; returns 1 for each that was taken for the first time, else 0."""
        fresh = self._fresh[group]
        if not self.left[group]:
            return b""
        taken = array("i", slots)
        if len(taken) > _FEW:
            at, view = np.frombuffer(slots, np.int32), np.frombuffer(fresh, np.uint8)
            first = view[at].tobytes()
            view[at] = 0
        else:
            first = bytes(map(fresh.__getitem__, taken))
            for slot in taken:
                fresh[slot] = 0
        self.left[group] -= first.count(1)
        return first


REMEMBERED = 4096
"""Number of removed requests that are remembered; the one that was removed first is forgotten first."""


@dataclass(slots=True)
class _Request:
    """A request, and the tokens from `first` to `stop` that it has computed itself."""

    request_id: RequestId
    namespace: Namespace
    num_prompt_tokens: int
    first: int
    num_tokens: int = 0
    stop: int = 0
    preempted: bool = False

    def returns_as(self, event: ev.SequenceAdded) -> bool:
        """True if this removed request is admitted again, rather than another one with the same id."""
        same_length = self.num_prompt_tokens <= event.num_tokens <= self.num_tokens
        return self.namespace == event.namespace and (event.resumed or self.preempted or same_length)


class OwnTokens:
    """Own computed tokens of sequences: a fold over their begin, rewind and end."""

    def __init__(self) -> None:
        self._running: dict[int, _Request] = {}
        self._removed: dict[RequestId, _Request] = {}

    def admit(self, event: ev.SequenceAdded) -> int:
        """Note an admitted request; returns how many of its reused tokens it had computed itself before."""
        first = event.reused
        request = _Request(event.request_id, event.namespace, event.num_tokens, first)
        self._running[event.handle] = request
        before = self._removed.pop(event.request_id, None)
        if before is None and event.resumed:
            return first  # its first run is forgotten, or older than the manager: it may have computed all
        if before is None or not before.returns_as(event):
            return 0
        request.num_prompt_tokens = before.num_prompt_tokens
        request.first = min(first, before.first)
        return max(0, min(first, before.stop) - before.first)

    def fork(self, event: ev.SequenceForked) -> None:
        """Note a branch."""
        parent = self._running.get(event.handle)
        if parent is not None:
            self._running[event.child] = replace(parent, request_id=event.request_id)

    def rewind(self, event: ev.SequenceRewound) -> None:
        """Note a rewind: the request itself computes the tokens in the place of those taken back."""
        request = self._running.get(event.handle)
        if request is not None:
            request.first = min(request.first, event.num_tokens - 1)
            request.num_prompt_tokens = min(request.num_prompt_tokens, event.num_tokens)

    def remove(self, event: ev.SequenceRemoved) -> None:
        """Note a request that has ended, or was preempted."""
        request = self._running.pop(event.handle, None)
        if request is None:
            return
        request.num_tokens, request.stop = event.num_tokens, event.computed
        request.preempted = event.why == ev.EndReason.PREEMPTED
        self._removed[request.request_id] = request
        if len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def begin_again(self, event: ev.TransferFailed) -> None:
        """Note a failed copy: running requests compute all of their tokens themselves."""
        for request in self._running.values():
            request.first = 0

    def clear(self) -> None:
        """Reset for another cache."""
        self._running.clear()
        self._removed.clear()


_GAUGES = ("blocks_blank", "blocks_unreferenced", "blocks_total")
"""Gauges of each window: a number per level."""
_COUNTED = [each.name for each in fields(Stats) if each.name not in (*_GAUGES, "windows")]
_OF_WINDOW = tuple(name for name in _COUNTED if name.startswith(("blocks_", "bytes_")))
_OF_WHOLE = tuple(name for name in _COUNTED if name not in _OF_WINDOW)
_AT = {name: index for names in (_OF_WINDOW, _OF_WHOLE) for index, name in enumerate(names)}
"""Index of a count within those of the whole or of its window."""
_GAUGES_AT, _TOTAL_AT = len(_OF_WINDOW), len(_OF_WINDOW) + 4
_WINDOW_SIZE = len(_OF_WINDOW) + 2 * len(_GAUGES)
_EVENTS, _BATCHES, _SEQUENCES = _AT["events"], _AT["batches"], _AT["sequences"]
_ALLOCATED, _DECODED, _NEW = (
    _AT["blocks_allocated"],
    _AT["blocks_allocated_decode"],
    _AT["blocks_allocated_new"],
)
_DECODE = ev.AllocateReason.DECODE
_MOVED = {
    MoveReason.OFFLOAD: "blocks_offloaded",
    MoveReason.ONBOARD: "blocks_onboarded",
    MoveReason.RECOMPUTED: "blocks_recomputed",
}
_MOVED_BYTES = {MoveReason.OFFLOAD: "bytes_offloaded", MoveReason.ONBOARD: "bytes_onboarded"}
_COLUMNS: dict[type[ev.Event], tuple[str, str]] = {
    ev.BlocksReused: ("blocks_deduplicated", "replaced"),
    ev.BlocksStored: ("blocks_stored", "slots"),
    ev.BlocksFilled: ("blocks_stored", "slots"),
    ev.BlocksUpdated: ("blocks_updated", "slots"),
}
"""Counters of the entries of a column: the count, and the column's field."""


class StatsCounter:
    """Counts events."""

    def __init__(self, bus: EventBus) -> None:
        self._counts = [0] * len(_OF_WHOLE)
        self._published = self._counts.copy()
        self._windows: dict[int, int] = {}
        """Start of the counts of each window. Windows that a later cache of the log does not have keep theirs."""
        self._begin: list[int] = []
        """Start of the counts by group."""
        self._gauges: list[slice] = []
        """Place of the gauges by group."""
        self._block_bytes: list[int] = []
        self._tokens_per_block = 1
        self._first_uses = FirstUses(())
        self._own = OwnTokens()
        bus.subscribe(self._on_created, ev.CacheCreated)
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._on_input, ev.EncoderAdded)
        bus.subscribe(self._own.fork, ev.SequenceForked)
        bus.subscribe(self._own.rewind, ev.SequenceRewound)
        bus.subscribe(self._own.remove, ev.SequenceRemoved)
        bus.subscribe(self._own.begin_again, ev.TransferFailed)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_copied, ev.BlocksCopied)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_removed, ev.BlocksRemoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)
        for kind, (counter, column) in _COLUMNS.items():
            bus.subscribe(self._counting(counter, attrgetter(column)), kind)

    def publish(self, state: CacheState, num_events: int) -> None:
        """Make the totals of the flushed events visible to other threads."""
        counts = self._counts
        counts[_EVENTS] += num_events
        counts[_BATCHES] += 1
        counts[_SEQUENCES] = len(state.handles)
        for gauges, group in zip(self._gauges, state.groups):  # noqa: B905  not yet any groups, or all
            primary, secondary = group.levels
            counts[gauges] = (
                len(primary.blank),
                len(secondary.blank),
                primary.unreferenced,
                secondary.unreferenced,
            )
        if state.positional:
            held, idle = shared_slots(state.positional)
            begin = self._gauges[0].start
            counts[begin] -= held + idle
            counts[begin + 2] += idle
        # Copied only, since this runs at every step; readers make a `Stats` of the copy.
        self._published = counts[:]

    def read(self) -> Stats:
        """Return the totals and gauges of the last flush; from any thread."""
        counts = self._published
        begins = {window: begin for window, begin in self._windows.items() if begin < len(counts)}
        total = [0] * _WINDOW_SIZE
        for begin in begins.values():
            total = [a + b for a, b in zip(total, counts[begin : begin + _WINDOW_SIZE], strict=True)]
        windows = {window: Stats(**_window(counts, begin)) for window, begin in begins.items()}
        whole: dict[str, Any] = dict(zip(_OF_WHOLE, counts, strict=False))
        return Stats(**whole, **_window(total, 0), windows=windows)

    def _add(self, name: str, group: int, more: int) -> None:
        self._counts[self._begin[group] + _AT[name]] += more

    def _on_created(self, event: ev.CacheCreated) -> None:
        counts, windows = self._counts, self._windows.copy()
        for begin in windows.values():
            counts[begin + _GAUGES_AT : begin + _WINDOW_SIZE] = [0] * (_WINDOW_SIZE - _GAUGES_AT)
        for group in event.groups:
            if group.window not in windows:
                windows[group.window] = len(counts)
                counts += [0] * _WINDOW_SIZE
            at = windows[group.window] + _TOTAL_AT
            counts[at : at + 2] = group.num_blocks
        self._windows = windows
        self._begin[:] = [windows[group.window] for group in event.groups]
        self._gauges = [slice(begin + _GAUGES_AT, begin + _TOTAL_AT) for begin in self._begin]
        self._block_bytes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
        self._tokens_per_block = event.tokens_per_block
        self._first_uses = FirstUses(group.num_blocks[PRIMARY] for group in event.groups)
        self._own.clear()

    def _on_added(self, event: ev.SequenceAdded) -> None:
        counts = self._counts
        counts[_AT["requests"]] += 1
        counts[_AT["prompt_tokens"]] += event.num_tokens
        own, reused = self._own.admit(event), event.reused
        partial, missed = started_and_missed(event, self._tokens_per_block)
        # Excludes an encoder's window: its reuse has an event of its own.
        of_windows = zip(self._begin, event.reused_primary, event.reused_secondary)  # noqa: B905
        for begin, primary, secondary in of_windows:
            counts[begin + _AT["blocks_missed"]] += missed
            if reused:
                counts[begin + _AT["blocks_reused_full"]] += (primary + secondary) // self._tokens_per_block
                counts[begin + _AT["blocks_reused_partial"]] += partial
        if reused:
            # Where the windows differ, tokens that any of them has to onboard count as reused from secondary.
            secondary, copied = max(event.reused_secondary), event.reused_partial
            counts[_AT["reused_tokens_primary"]] += reused - copied - secondary
            counts[_AT["reused_tokens_secondary"]] += secondary
            counts[_AT["reused_tokens_partial"]] += copied
            counts[_AT["reused_tokens_own"]] += own

    def _on_input(self, event: ev.EncoderAdded) -> None:
        full, missed = input_blocks(event, self._tokens_per_block)
        self._counts[_AT["encoder_tokens"]] += event.num_tokens
        reused = min(full * self._tokens_per_block, event.num_tokens)
        self._counts[_AT["reused_encoder_tokens"]] += reused
        self._add("blocks_reused_full", event.group, full)
        self._add("blocks_missed", event.group, missed)

    def _counting(self, counter: str, slots_of: Callable[[Any], bytes]) -> Callable[[Any], None]:
        counts, begin, at = self._counts, self._begin, _AT[counter]

        def count(event: Any) -> None:
            counts[begin[event.group] + at] += len(slots_of(event)) // SLOT_BYTES

        return count

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        group, counts = event.group, self._counts
        begin = self._begin[group]
        counts[begin + (_DECODED if event.why is _DECODE else _ALLOCATED)] += len(event.slots) // SLOT_BYTES
        if self._first_uses.left[group]:
            counts[begin + _NEW] += self._first_uses.take(group, event.slots).count(1)

    def _on_copied(self, event: ev.BlocksCopied) -> None:
        self._add("blocks_copied", event.group, 1)
        if event.source_level != PRIMARY or event.source != event.target:
            of_block = self._block_bytes[event.group]
            self._add("bytes_copied", event.group, of_block * event.num_tokens // self._tokens_per_block)

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        blocks = len(event.from_slots) // SLOT_BYTES
        self._add(_MOVED[event.why], event.group, blocks)
        if event.why in _MOVED_BYTES:
            self._add(_MOVED_BYTES[event.why], event.group, blocks * self._block_bytes[event.group])
        if event.to_level == PRIMARY:
            self._first_uses.take(event.group, event.to_slots)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        blocks = len(event.slots) // SLOT_BYTES
        self._add("blocks_removed", event.group, blocks)
        if event.level == SECONDARY and event.why != ev.RemoveReason.SUPERSEDED:
            self._add("blocks_dropped", event.group, blocks)

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        for group, removed in enumerate(event.removed):
            self._add("blocks_removed", group, sum(removed))


def started_and_missed(event: ev.SequenceAdded, tokens_per_block: int) -> tuple[int, int]:
    """Count the blocks of a prompt in each group that were reused from the start only, and that had to be computed
    whole.
    """
    blocks, partial = -(-event.num_tokens // tokens_per_block), int(event.reused_partial > 0)
    return partial, blocks - event.reused // tokens_per_block - partial


def input_blocks(event: ev.EncoderAdded, tokens_per_block: int) -> tuple[int, int]:
    """Count the reused and missed blocks of an encoder's input."""
    reused = event.reused_primary + event.reused_secondary
    return reused, -(-event.num_tokens // tokens_per_block) - reused


def _window(counts: list[int], begin: int) -> dict[str, Any]:
    """Return the fields of one window's stats, or of those of the whole."""
    values: dict[str, Any] = dict(zip(_OF_WINDOW, counts[begin:], strict=False))
    values["blocks_allocated"] += values["blocks_allocated_decode"]  # counted separately
    for index, name in enumerate(_GAUGES):
        at = begin + _GAUGES_AT + 2 * index
        values[name] = (counts[at], counts[at + 1])
    return values


@dataclass(slots=True)
class _CountedRequest:
    """Record of a running request so far."""

    request_id: RequestId
    prompt_tokens: int
    reused_tokens: int = 0
    blocks: tuple[int, ...] = (0, 0, 0)
    """Blocks in all windows: reused in full, in part, and missed."""
    allocated: int = 0
    new: int = 0


class RequestCounter:
    """Records of ended requests, `keep` at most: the oldest are dropped first.

    Requests that already run when a manager resumes have no record: their admission is unknown.
    """

    def __init__(self, bus: EventBus, created: ev.CacheCreated, keep: int) -> None:
        self._ended: deque[RequestStats] = deque(maxlen=keep)
        self._running: dict[int, _CountedRequest] = {}
        self._size = created.tokens_per_block
        self._first_uses = FirstUses(group.num_blocks[PRIMARY] for group in created.groups)
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._on_forked, ev.SequenceForked)
        bus.subscribe(self._on_input, ev.EncoderAdded)
        bus.subscribe(self._on_input_removed, ev.EncoderRemoved)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_removed, ev.SequenceRemoved)

    def take(self) -> list[RequestStats]:
        """Return the records since the last call, oldest first; from any thread."""
        taken = []
        for _ in range(len(self._ended)):
            try:
                taken.append(self._ended.popleft())
            except IndexError:  # another thread takes them concurrently
                break
        return taken

    def _on_added(self, event: ev.SequenceAdded) -> None:
        partial, missed = started_and_missed(event, self._size)
        reused, windows = [*event.reused_primary, *event.reused_secondary], len(event.reused_primary)
        full = sum([tokens // self._size for tokens in reused])
        blocks = full, partial * windows, missed * windows
        self._running[event.handle] = _CountedRequest(
            event.request_id, event.num_tokens, event.reused, blocks
        )

    def _on_input(self, event: ev.EncoderAdded) -> None:
        """Count an encoder's input, and its allocations, for the request that it belongs to."""
        request = self._running.get(event.sequence)
        if request is not None:
            full, partial, missed = request.blocks
            more, fewer = input_blocks(event, self._size)
            request.blocks = full + more, partial, missed + fewer
            self._running[event.handle] = request

    def _on_input_removed(self, event: ev.EncoderRemoved) -> None:
        self._running.pop(event.handle, None)

    def _on_forked(self, event: ev.SequenceForked) -> None:
        parent = self._running.get(event.handle)
        if parent is not None:
            self._running[event.child] = _CountedRequest(event.request_id, parent.prompt_tokens)

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        first = iter(self._first_uses.take(event.group, event.slots))
        handles = array("q", event.handles)
        for handle, count in zip(handles, array("I", event.counts) or repeat(1), strict=False):
            new = sum(next(first, 0) for _ in range(count))
            request = self._running.get(handle)
            if request is not None:
                request.allocated += count
                request.new += new

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        if event.to_level == PRIMARY:
            self._first_uses.take(event.group, event.to_slots)

    def _on_removed(self, event: ev.SequenceRemoved) -> None:
        request = self._running.pop(event.handle, None)
        if request is None:
            return
        full, partial, missed = request.blocks
        self._ended.append(
            RequestStats(
                request_id=request.request_id,
                handle=event.handle,
                why=event.why,
                prompt_tokens=request.prompt_tokens,
                reused_tokens=request.reused_tokens,
                num_tokens=event.num_tokens,
                computed_tokens=event.computed,
                blocks_allocated=request.allocated,
                blocks_allocated_new=request.new,
                blocks_reused_full=full,
                blocks_reused_partial=partial,
                blocks_missed=missed,
            )
        )
