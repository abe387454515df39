"""What a reader makes of records: wherever it begins and whatever is missing, it is exact once it knows a state."""

from __future__ import annotations

import random

import pytest

from events.brokers.records import StreamRecord, parse_record
from events.brokers.subscriber import RecordFollower
from events.errors import EventDecodeError
from events.subscribe.index import Index
from tests.support.feeds.publisher import CLEARED, batch, removed, stored
from tests.support.seeds import seeds


def stream(rng: random.Random, batches: int) -> tuple[list[StreamRecord], list[set[int]]]:
    """Records as a feed writes them, and what is resident after each."""
    records, truth = [StreamRecord(0, batch(CLEARED))], [set[int]()]
    held: list[int] = []
    seq = publishing = 0
    pieces: list[StreamRecord] = []
    for number in range(1, batches):
        if pieces and rng.random() < 0.5:
            record = pieces.pop(0)
            if rng.random() < 0.05:
                pieces = []  # abandoned
        elif not pieces and rng.random() < 0.1:
            publishing += 1
            cut = [held[at : at + 3] for at in range(0, len(held), 3)]
            payloads = [batch(CLEARED), *(batch(stored(*some)) for some in cut)]
            last = len(payloads) - 1
            pieces = [StreamRecord(seq, each, at, publishing, at == last) for at, each in enumerate(payloads)]
            record = pieces.pop(0)
        else:
            seq += 1 + (rng.random() < 0.02) * 5  # numbers that were never used come with "cleared"
            if held and rng.random() < 0.4:
                gone = held.pop(rng.randrange(len(held)))
                record = StreamRecord(seq, batch(removed(gone)))
            else:
                held.append(number)
                record = StreamRecord(seq, batch(stored(number)))
            if seq > records[-1].seq + 1 and record.piece is None:
                record = StreamRecord(seq, batch(CLEARED, *(stored(name) for name in held)))
        records.append(record)
        truth.append(set(held))
    return records, truth


@pytest.mark.parametrize("seed", seeds(range(200), quick=20))
def test_exact_wherever_it_begins_and_whatever_is_cut_out(seed: int) -> None:
    """A stream is cut at its beginning and in the middle, as by trimming; whoever has a state has the right one."""
    rng = random.Random(seed)
    records, truth = stream(rng, 300)
    begin, hole = rng.randrange(200), rng.randrange(250)
    skipped = range(hole, hole + rng.randrange(1, 40))
    follower, index, exact = RecordFollower("w"), Index(), 0
    for at, (record, resident) in enumerate(zip(records, truth, strict=True)):
        if at < begin or at in skipped:
            continue
        waited = follower.waiting
        for report in follower.take(record):
            index.fold(report)
        # Of a hole only the next batch tells; pieces mean nothing to who has a state.
        if not follower.waiting and (waited or record.piece is None):
            assert index.resident() == resident, at
            exact += 1
    assert (index.unknown_removals, index.repeated_stores, index.missed_batches) == (0, 0, 0)
    assert exact > 20 or not any(record.last for record in records[max(begin, hole + 40) :])


@pytest.mark.parametrize("tag", ["", "x", "-1", "1/2", "1/2/3/first", "1/2/3/last/", None])
def test_tags_of_others(tag: str | None) -> None:
    """What is no record of a feed is not taken for one."""
    with pytest.raises(EventDecodeError):
        parse_record(tag, b"")


@pytest.mark.parametrize(
    "record", [StreamRecord(17, b"x"), StreamRecord(17, b"x", 5, 2, True), StreamRecord(0, b"", 0, 0)]
)
def test_tags_come_back(record: StreamRecord) -> None:
    """A record is read as it was written."""
    assert parse_record(record.tag, record.payload) == record
    assert parse_record(record.tag.encode(), record.payload) == record


_BATCH = batch(CLEARED)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"garbage", b"x"),
        (b"garbage",),
        (_BATCH, b"x"),
        (_BATCH, b""),
        (b"", _BATCH),
        (_BATCH, b"\x93\x01\x90\xce\xff\xff\xff\xff"),
        (_BATCH, b"\x93\xcb" + bytes(8) + b"\xdc"),
    ],
)
def test_a_state_that_is_none_is_dropped(pieces: tuple[bytes, ...]) -> None:
    """It is counted, tells nothing, and the next state is taken as if it had not been."""
    follower, index = RecordFollower("w"), Index()
    last = len(pieces) - 1
    for at, piece in enumerate(pieces):
        assert follower.take(StreamRecord(0, piece, at, 1, at == last)) == []
    assert (follower.malformed, follower.waiting) == (1, True)
    for record in (
        StreamRecord(0, _BATCH, 0, 2),
        StreamRecord(0, batch(stored(5)), 1, 2, True),
        StreamRecord(1, batch(stored(6))),
    ):
        for report in follower.take(record):
            index.fold(report)
    assert (index.resident(), index.missed_batches, follower.malformed) == ({5, 6}, 0, 1)
