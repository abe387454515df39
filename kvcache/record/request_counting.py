"""A record of each request when it ends, for engines that tell their users what the cache did for them.

Counting by request costs a little for each block that is allocated, so it is done only for who asks.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import repeat

from events import types as ev
from events.bus import EventBus
from events.types import PRIMARY, RequestId
from kvcache.record.counting import input_blocks, started_and_missed
from kvcache.record.first_uses import FirstUses
from kvcache.stats import RequestStats


class _Running:
    """What is known of a request so far."""

    __slots__ = ("allocated", "blocks", "new", "prompt_tokens", "request_id", "reused_tokens")

    def __init__(
        self,
        request_id: RequestId,
        prompt_tokens: int,
        reused_tokens: int = 0,
        blocks: tuple[int, ...] = (0, 0, 0),
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens, self.reused_tokens = prompt_tokens, reused_tokens
        self.blocks = blocks
        """Of all windows: reused in full, in part, and missed."""
        self.allocated = self.new = 0


class RequestCounter:
    """Records of requests that have ended, so many at most: the oldest are dropped first.

    What runs already when a manager resumes has no record: nobody knows how it began.
    """

    def __init__(self, bus: EventBus, created: ev.CacheCreated, keep: int) -> None:
        self._ended: deque[RequestStats] = deque(maxlen=keep)
        self._running: dict[int, _Running] = {}
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
        """The records since the last call, oldest first; from any thread."""
        taken = []
        for _ in range(len(self._ended)):
            try:
                taken.append(self._ended.popleft())
            except IndexError:  # another thread takes them, too
                break
        return taken

    def _on_added(self, event: ev.SequenceAdded) -> None:
        partial, missed = started_and_missed(event, self._size)
        reused, windows = [*event.reused_primary, *event.reused_secondary], len(event.reused_primary)
        full = sum([tokens // self._size for tokens in reused])
        blocks = full, partial * windows, missed * windows
        self._running[event.handle] = _Running(event.request_id, event.num_tokens, event.reused, blocks)

    def _on_input(self, event: ev.EncoderAdded) -> None:
        """What is allocated for it counts for the request that brought it."""
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
            self._running[event.child] = _Running(event.request_id, parent.prompt_tokens)

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
