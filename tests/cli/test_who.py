"""`kvcache who`: who has a slot at a moment of a log, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.packed import unpack_i32
from events.types import BlocksMoved, BlocksStored, SequenceRemoved
from tests.support.commands import Kvcache


def stored(log: Path, after: int = 0) -> tuple[int, int, BlocksStored]:
    """Where blocks are stored of a request that runs on: batch, place and event."""
    return next(
        (batch.seq, index, event)
        for batch in LogReader(log)
        for index, event in enumerate(batch.events)
        if isinstance(event, BlocksStored)
        and batch.seq >= after
        and not any(isinstance(each, SequenceRemoved) for each in batch.events)
    )


def test_it_names_holder_block_and_event(kvcache: Kvcache, log: Path) -> None:
    """Of a slot that has just been stored: its request, its block, its name, and the event's address."""
    seq, index, event = stored(log, 40)
    slot = int(unpack_i32(event.slots)[0])
    done = kvcache("who", log, "--slot", slot, "--at", seq, "--json")
    assert done.code == 0
    said = json.loads(done.out)
    (group,) = said["groups"]
    assert (said["seq"], said["level"], said["slot"]) == (seq, "primary", slot)
    last = group["changes"][-1]
    assert (last["seq"], last["index"], last["type"]) == (seq, index, "BlocksStored")
    now = group["now"]
    assert (now["block"], now["cached"], now["landed"]) == (event.first_block, True, True)
    assert now["name"] == event.keys[:8].hex()
    assert {key: last[key] for key in now} == now
    (request,) = now["requests"]
    people = kvcache("who", log, "--slot", slot, "--at", seq, "--time", "utc")
    lines = people.out.splitlines()
    assert lines[0].startswith(f"slot {slot} of primary, after batch {seq} (2026-01-01T")
    assert f"block {event.first_block}, cached as {now['name']}, held by {request}" in lines[1]
    assert f"BlocksStored {seq}.{index} (" in lines[2]
    assert lines[-1].split()[0] == f"{seq}.{index}"


def test_secondary_has_slots_of_its_own(kvcache: Kvcache, log: Path) -> None:
    """A block that was moved is in one and not in the other."""
    batch, move = next(
        (batch, event) for batch in LogReader(log) for event in batch.events if isinstance(event, BlocksMoved)
    )
    slot = int(unpack_i32(move.to_slots)[0])
    done = kvcache("who", log, "--slot", slot, "--level", "secondary", "--at", batch.seq, "--json")
    (change, *_) = json.loads(done.out)["groups"][0]["changes"]
    assert (change["type"], change["why"], change["seq"]) == ("BlocksMoved", "offload", batch.seq)
    assert (change["requests"], change["cached"], change["landed"]) == ([], True, False)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--slot", 120), "no slot 120 in primary: it has 120 slots, counted from 0"),
        (("--slot", 100, "--level", "secondary"), "no slot 100 in secondary"),
        (("--slot", 1, "--group", 1), "no group 1: the cache has 1 group, counted from 0"),
        (("--slot", 1, "--at", 10**9), "after the end of the log"),
        (("--slot", -1), "--slot"),
        ((), "--slot"),
    ],
)
def test_what_there_is_not(kvcache: Kvcache, log: Path, more: tuple[Any, ...], reason: str) -> None:
    """The error says what there is."""
    done = kvcache("who", log, *more)
    assert (done.code, done.out) == (2, "")
    assert reason in done.err


def test_a_slot_that_nobody_had(kvcache: Kvcache, log: Path) -> None:
    """It is blank since the log's beginning."""
    done = kvcache("who", log, "--slot", 119, "--at", 0)
    assert done.out.splitlines()[1:] == ["  now    blank", "  since  the log's beginning"]
