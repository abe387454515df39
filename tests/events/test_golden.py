"""Encodings that must never change, made by hand and by other code than the one under test.

`tests/golden/events.json` has, for every event type, the array and the JSON that were written down by hand, and
the msgpack that `tests.oracles.packer` makes of the array inside a batch. A type that is new or has grown a
field gets its entry in the same way; what is there for released formats stays.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest

from events import AnyEvent, EventBatch, Gap
from events.codec import decode_batch, encode_batch, to_dict, to_json
from events.log import LogWriter
from events.log.frames import VERSION
from tests.oracles.json_reader import from_json
from tests.oracles.packer import frame, pack, segment_header, with_bytes
from tests.support.logs.logs import LOG_ID, TIME, plain, read_log
from tests.support.logs.sample_events import EVENTS, GOLDEN, KEY_BYTES

__all__ = ["plain"]
KINDS = {event.__name__: event for event in typing.get_args(AnyEvent)}


def test_every_event_type_has_a_golden_encoding() -> None:
    """The file has one entry for each type of the union, and none for anything else."""
    assert set(EVENTS) == set(KINDS)


@pytest.mark.parametrize("name", EVENTS)
def test_golden_bytes_are_those_of_an_independent_packer(name: str) -> None:
    """The bytes in the file are the msgpack of the array in the file, as the specification has it."""
    golden = EVENTS[name]
    assert pack([5, TIME, [with_bytes(golden["array"])]]).hex() == golden["msgpack"]


@pytest.mark.parametrize("name", EVENTS)
def test_golden_bytes_decode_to_golden_fields_and_back(name: str) -> None:
    """Each event's bytes mean the fields that were written down for it, and those fields give the same bytes."""
    golden = EVENTS[name]
    batch = decode_batch(bytes.fromhex(golden["msgpack"]))
    assert (batch.seq, batch.ts, len(batch.events)) == (5, TIME, 1)
    assert to_dict(batch.events[0], KEY_BYTES) == golden["json"]
    assert encode_batch(batch).hex() == golden["msgpack"]


@pytest.mark.parametrize("name", EVENTS)
def test_golden_json_is_read_back(name: str) -> None:
    """JSON of an event holds all of it: the bytes can be made from it."""
    golden = EVENTS[name]
    line = json.dumps({"seq": 5, "ts": TIME, "events": [golden["json"]]})
    assert encode_batch(from_json(line)).hex() == golden["msgpack"]
    assert json.loads(to_json(from_json(line), KEY_BYTES)) == json.loads(line)


@pytest.mark.parametrize("name", EVENTS)
def test_fields_added_later_are_ignored_by_older_readers(name: str) -> None:
    """A newer writer's extra field at the end of an event does not stop this reader."""
    array = with_bytes(EVENTS[name]["array"])
    array += [None] * (
        1 + len(KINDS[name].__struct_fields__) - len(array)
    )  # what is left out where it is None
    assert decode_batch(pack([5, TIME, [[*array, "from the future"]]])) == decode_batch(
        bytes.fromhex(EVENTS[name]["msgpack"])
    )


@pytest.mark.parametrize("name", EVENTS)
def test_fields_with_defaults_may_be_missing(name: str) -> None:
    """An older writer's event without the fields that have defaults is read, from bytes and from JSON."""
    optional = [f.name for f in msgspec.structs.fields(KINDS[name]) if f.default is not msgspec.NODEFAULT]
    optional = [each for each in optional if each in EVENTS[name]["json"]]
    array = with_bytes(EVENTS[name]["array"])[: None if not optional else -len(optional)]
    fields = {key: value for key, value in EVENTS[name]["json"].items() if key not in optional}
    batch = decode_batch(pack([5, TIME, [array]]))
    assert from_json(json.dumps({"seq": 5, "ts": TIME, "events": [fields]})) == batch


def golden_segment(version: int = 1) -> bytes:
    """A log of two batches, a loss of two, a batch that tells of it, and an orderly end."""
    epoch = 0
    first = pack([0, TIME, [["ContextComputed", 1, 2]]])
    second = pack([1, TIME + 1, [["ContextComputed", 1, 3], ["ContextComputed", 1, 4]]])
    third = pack([4, TIME + 2, [["Gap", 2, 3, "the log could not keep up"]]])
    return (
        segment_header(LOG_ID, epoch, number=0, base_seq=0, version=version)
        + frame(LOG_ID, epoch, 0, first, 1, flags=4)
        + frame(LOG_ID, epoch, 1, second, 2, previous_crc=crc32(first))
        + frame(LOG_ID, epoch, 4, third, 1, previous_crc=crc32(second), flags=2 | 4)
        + frame(LOG_ID, epoch, 5, b"", 0, previous_crc=crc32(third), flags=1 | 4)
    )


NAME = f"{0:020d}.kvlog"


def test_golden_segment_is_that_of_independent_code() -> None:
    """The segment in the repository has the bytes that the format's description gives."""
    assert (GOLDEN / "log" / NAME).read_bytes() == golden_segment()


def test_golden_segment_is_read() -> None:
    """A log whose bytes the format's description gives is read, with its gap and its end."""
    content, end = read_log(GOLDEN / "log")
    assert [b.seq for b in content] == [0, 1, 4]
    assert content[2].events == (Gap(2, 3, "the log could not keep up"),)
    assert (end.kind, end.last_seq, end.next_seq, end.offset) == ("clean", 4, 5, len(golden_segment()))


@pytest.mark.usefixtures("plain")
def test_writer_makes_the_golden_segment(tmp_path: Path, hold_disk: Any) -> None:
    """The writer, given those batches and losing two, writes those bytes, but for the version."""
    first, second, third = read_log(GOLDEN / "log")[0]
    with LogWriter(tmp_path, log_id=LOG_ID, overflow="drop", max_queued_batches=2) as log:
        with hold_disk():
            assert [log.append(item) for item in (first, second)] == [True, True]
            assert [log.append(EventBatch(seq, TIME, ())) for seq in (2, 3)] == [False, False]
        log.flush()
        assert log.pop_gap() == third.events[0]
        assert log.append(third)
    assert (tmp_path / NAME).read_bytes() == golden_segment(VERSION)
