"""A bounded buffer of recent events in TensorRT-LLM's shape, for programs that poll `get_latest_events`.

What is flushed becomes visible at once; when more than `max_size` dicts wait, the oldest go, which a reader sees
as a hole in `event_id`. Reading empties the buffer, from any thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from typing import Any

from events import types as ev
from events.bus import EventBus
from events.feed.changes import Cached
from events.feed.inventory import update_of
from events.formats import trtllm
from events.ids import BlockIndex, GroupIndex, Handle
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES, names_of_keys, unpack_names
from events.types import PRIMARY
from kvcache.fold.group import CachedPart
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.fold.state import CacheState


class LatestEvents:
    """Collects events of the running step; `publish` makes them visible."""

    def __init__(self, bus: EventBus, state: CacheState, max_size: int) -> None:
        self._state = state
        self._step: list[tuple[int, trtllm.Data]] = []
        self._visible: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._changed = threading.Condition()
        self._next_id = 0
        self._resident: list[set[int]] = []
        """Per group: the names that readers take for cached. Needed because their format has no "cleared"."""
        self._beginning = False
        """A cache was created in this step: the state that it begins with may follow."""
        bus.subscribe(self._on_created, ev.CacheCreated)
        bus.subscribe(self._on_exported, ev.StateExported)
        bus.subscribe(self._on_stored, ev.BlocksStored)
        bus.subscribe(self._on_filled, ev.BlocksFilled)
        bus.subscribe(self._on_updated, ev.BlocksMoved, ev.BlocksUpdated)
        bus.subscribe(self._on_removed, ev.BlocksRemoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)

    def get(self, timeout: float | None) -> list[dict[str, Any]]:
        """Take everything visible; wait for something so many seconds (None: for ever)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._visible), timeout)
            events = list(self._visible)
            self._visible.clear()
            return events

    def publish(self) -> None:
        """Make the events of the step visible."""
        self._beginning = False
        if not self._step:
            return
        created = self._state.created
        assert created is not None
        with self._changed:
            for group, data in self._step:
                told = created.hash_algorithm, created.attention_dp_rank
                envelope = trtllm.envelope(created.groups[group], *told)
                self._visible.append({"event_id": self._next_id, "data": data, **envelope})
                self._next_id += 1
            self._changed.notify_all()
        self._step.clear()

    def _on_created(self, event: ev.CacheCreated) -> None:
        self._beginning = True
        self._resident = [set() for _ in event.groups]
        self._step += [(index, trtllm.created(group)) for index, group in enumerate(event.groups)]

    def _on_exported(self, _: ev.StateExported) -> None:
        """What a cache begins with is told as if it were stored now; a later state repeats what is known."""
        if not self._beginning or not self._state.hashing.key_bytes:
            return
        self._beginning = False
        told = [
            (group, root.namespace, run, part)
            for group in self._state.groups
            for root in group.tree.roots.values()
            for run in runs_below(root)
            for part in group.parts(run)
        ]
        # Of what nobody could see any more, no dicts are made: with its tokens, a block takes kilobytes.
        unseen = max(0, len(told) - (self._visible.maxlen or 0))
        self._next_id += unseen
        for number, (group, namespace, run, part) in enumerate(told):
            cached = self._as_cached(group.index, namespace, run, part)
            self._resident[group.index].update(unpack_names(cached.names).tolist())
            if number >= unseen:
                self._step.append((group.index, trtllm.stored(cached)))

    def _as_cached(self, group: GroupIndex, namespace: ev.Namespace, run: Run, part: CachedPart) -> Cached:
        """Blocks of a run as if they were stored now, by nobody."""
        state, key_bytes = self._state, self._state.hashing.key_bytes
        begin, end, size = part.begin * key_bytes, part.end * key_bytes, state.tokens_per_block
        above = bytes(run.keys[begin - key_bytes : begin]) if begin else run.parent.key_of_last(key_bytes)
        symbols = bytes(run.symbols[part.begin * size * TOKEN_BYTES : part.end * size * TOKEN_BYTES])
        return Cached(
            group,
            part.level,
            part.priority,
            names_of_keys(bytes(run.keys[begin:end]), key_bytes),
            above[:NAME_BYTES] if run.start + part.begin else b"",
            state.symbols.spell(symbols),
            size,
            namespace,
        )

    def _on_stored(self, event: ev.BlocksStored) -> None:
        state, size = self._state, self._state.tokens_per_block
        sequence, key_bytes = state.sequences[event.handle], state.hashing.key_bytes
        last = event.first_block + len(event.slots) // SLOT_BYTES
        # The event gives only those keys that no other window's event has given before.
        keys = bytes(sequence.keys[event.first_block * key_bytes : last * key_bytes])
        names = names_of_keys(keys, key_bytes)
        first = event.first_block * size
        tokens = sequence.packed(first, first + (len(names) // NAME_BYTES - 1) * size + event.last_tokens)
        cached = Cached(
            event.group,
            event.level,
            event.priority,
            names,
            event.parent,
            state.symbols.spell(tokens),
            size,
            sequence.namespace,
        )
        self._step.append((event.group, trtllm.stored(cached)))
        self._resident[event.group].update(unpack_names(names).tolist())

    def _on_filled(self, event: ev.BlocksFilled) -> None:
        key_bytes, size = self._state.hashing.key_bytes, self._state.tokens_per_block
        rows = zip(array("q", event.handles), array("I", event.blocks), array("i", event.slots), strict=True)
        for at, (handle, block, slot) in enumerate(rows):
            self._on_stored(
                ev.BlocksStored(
                    handle=Handle(handle),
                    group=event.group,
                    first_block=BlockIndex(block),
                    parent=event.parents[at * NAME_BYTES : (at + 1) * NAME_BYTES],
                    keys=event.keys[at * key_bytes : (at + 1) * key_bytes],
                    slots=array("i", [slot]).tobytes(),
                    level=PRIMARY,
                    priority=event.priority,
                    last_tokens=size,
                )
            )

    def _on_updated(self, event: ev.BlocksMoved | ev.BlocksUpdated) -> None:
        self._step += [(event.group, data) for data in trtllm.updated(update_of(event))]

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        names = unpack_names(event.names).tolist()
        self._resident[event.group].difference_update(names)
        self._remove(event.group, names)

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        for group, names in enumerate(self._resident):
            if names:
                self._remove(group, sorted(names))
                names.clear()

    def _remove(self, group: int, names: list[int]) -> None:
        """Removals in a row become one event, as readers expect."""
        last = self._step[-1] if self._step else None
        if last is not None and last[0] == group and last[1]["type"] == "removed":
            last[1]["block_hashes"].extend(names)
        else:
            self._step.append((group, trtllm.removed(names)))
