"""Batches and the cache after each of them, as rows."""

from __future__ import annotations

from collections import Counter

from events import types as ev
from events.packed import HANDLE_BYTES, SLOT_BYTES, unpack_u32
from events.structs import LEVEL_NAMES
from events.types import EventBatch
from kvcache.audit.rows import OccupancyRow, StepRow
from kvcache.fold.positional_fold import shared_slots
from kvcache.fold.state import CacheState
from kvcache.replay import known_events


def step_row(batch: EventBatch, state: CacheState) -> StepRow:
    """The row of a batch. What is held, free to evict and blank is counted by the state after it."""
    counts: Counter[str] = Counter()
    for event in known_events(batch):
        _count(event, counts)
    return StepRow(
        seq=batch.seq,
        ts=batch.ts,
        admitted=counts["admitted"],
        refused=counts["refused"],
        ended=counts["ended"],
        running=len(state.sequences),
        prompt_tokens=counts["prompt"],
        reused_tokens=counts["reused"],
        computed_tokens=counts["prompt"] - counts["reused"],
        output_tokens=counts["output"],
        stored_blocks=counts["stored"],
        removed_blocks=counts["removed"],
        cleared_blocks=counts["cleared"],
        offloaded_blocks=counts["offload"],
        onboarded_blocks=counts["onboard"],
        occupancy=tuple(occupancy(state)),
    )


def _count(event: ev.Event, counts: Counter[str]) -> None:
    """Add what the event tells."""
    match event:
        case ev.SequenceAdded():
            counts["admitted"] += 1
            counts["prompt"] += event.num_tokens
            counts["reused"] += event.reused
        case ev.SequenceRemoved():
            counts["ended"] += 1
        case ev.AdmissionRefused():
            counts["refused"] += 1
        case ev.TokensAppended():
            counts["output"] += _appended(event)
        case ev.BlocksStored() | ev.BlocksFilled():
            counts["stored"] += len(event.slots) // SLOT_BYTES
        case ev.BlocksRemoved():
            counts["removed"] += len(event.slots) // SLOT_BYTES
        case ev.CacheCleared():
            # What sequences hold keeps its slots, but is cached no more.
            counts["cleared"] += sum(map(sum, event.removed)) + sum(event.unnamed)
        case ev.BlocksMoved():
            counts[event.why] += len(event.from_slots) // SLOT_BYTES


def _appended(event: ev.TokensAppended) -> int:
    if event.counts:
        return int(unpack_u32(event.counts).sum())
    return len(event.handles) // HANDLE_BYTES


def occupancy(state: CacheState) -> list[OccupancyRow]:
    """Of each level of each window, by what its blocks are."""
    windows = () if state.created is None else state.created.groups
    rows = list[OccupancyRow]()
    for created, group in zip(windows, state.groups, strict=True):
        for name, level in zip(LEVEL_NAMES, group.levels, strict=True):
            blank, unreferenced = len(level.blank), level.unreferenced
            if not rows:
                held, idle = shared_slots(state)
                blank, unreferenced = blank - held - idle, unreferenced + idle
            held = level.size - blank - unreferenced
            rows.append(OccupancyRow(created.window, name, level.size, held, unreferenced, blank))
    return rows
