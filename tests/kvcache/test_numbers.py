"""Handles and transfer ids: each epoch of a log has its own, no number comes twice, and their end is a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.ids import MAX_EPOCH, MAX_NUMBER, PER_EPOCH, epoch_of, first_number, numbers_left
from events.log import LogReader, LogWriter
from events.types import EpochStarted, SequenceAdded, StateExported
from kvcache.errors import OutOfNumbers
from kvcache.fold.state import CacheState
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.support.engines.traffic import Traffic, config, recorded


def at_number(*, handle: int = 1, transfer: int = 1) -> CacheState:
    """The state of an empty cache that has given out all numbers before these."""
    state = KVCacheManager(config()).state
    state.apply(msgspec.structs.replace(state.export(), next_handle=handle, next_transfer=transfer))
    return state


def resumed(state: CacheState, **options: Any) -> KVCacheManager:
    manager = KVCacheManager.resume(state, **options)
    assert manager.config == config(block_hash=state.hashing.name)
    return manager


def handles_in(directory: Path) -> list[int]:
    events = [event for batch in LogReader(directory) for event in batch.events]
    return [event.handle for event in events if isinstance(event, SequenceAdded)]


def test_epochs_share_no_number() -> None:
    """The ranges of epochs lie behind each other, the last one within an int64."""
    for epoch in (0, 1, 7, MAX_EPOCH):
        first, last = first_number(epoch), first_number(epoch + 1) - 2
        assert epoch_of(first) == epoch_of(last) == epoch_of(last + 1) == epoch
        assert (numbers_left(first), numbers_left(last), numbers_left(last + 1)) == (PER_EPOCH - 1, 1, 0)
    assert first_number(0) == 1
    assert first_number(MAX_EPOCH + 1) - 2 <= MAX_NUMBER < 2**63 - 1


@pytest.mark.parametrize("number", [2**31 - 2, 2**32 - 2, 2**40 + 2**32 - 2])
def test_numbers_beyond_32_bits(tmp_path: Path, number: int) -> None:
    """Admission, decoding, copies and the end of requests work where numbers grow beyond 32 bits, and all replays."""
    manager = resumed(at_number(handle=number, transfer=number), log=tmp_path / "log")
    traffic = Traffic(manager, 7)
    traffic.record(120)
    assert manager.state.next_handle > number + 10
    assert manager.state.next_transfer > number + 10
    manager.check()
    manager.close()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.checkpoints_verified
    assert not replayed.checkpoints_failed
    replayed.state.check()
    assert handles_in(tmp_path / "log")[0] == number


def test_end_of_the_handles_is_a_refusal() -> None:
    """The last handle is given, the one after it is refused before anything has changed, and what runs goes on."""
    manager = resumed(at_number(handle=first_number(3) - 3))
    batch = [Request(number, [number, 2, 3]) for number in range(3)]
    before = manager.fingerprint()
    assert manager.can_add(batch) == 2
    with pytest.raises(OutOfNumbers):
        manager.add_sequences(batch)
    assert manager.fingerprint() == before
    assert [each.handle for each in manager.add_sequences(batch[:2])] == [
        first_number(3) - 3,
        first_number(3) - 2,
    ]
    before = manager.fingerprint()
    assert manager.can_add(batch[2:]) == 0
    with pytest.raises(OutOfNumbers):
        manager.add_sequence("more", [1])
    assert manager.fingerprint() == before
    manager.add_tokens([0, 1], [5, 5])
    manager.remove_sequence(0)
    manager.check()


def test_copies_end_with_numbers_left_for_what_runs() -> None:
    """Long before transfer ids end, nothing more is admitted; decoding, which may offload, is not concerned."""
    manager = resumed(at_number(transfer=first_number(1) - 2**36 - 2))
    manager.add_sequence("last", [1, 2, 3])
    manager = resumed(at_number(transfer=first_number(1) - 2**36 - 1))
    with pytest.raises(OutOfNumbers):
        manager.add_sequence("more", [1])
    assert numbers_left(manager.state.next_transfer) > 2**35


def test_continuing_reads_nothing_of_the_epochs_before(tmp_path: Path) -> None:
    """A log is continued though all of its segments but the last are unreadable, and no number comes again."""
    with LogWriter(tmp_path / "log", segment_bytes=2000) as log, KVCacheManager(config(), log=log) as manager:
        Traffic(manager, 1).record(60)
    segments = sorted((tmp_path / "log").glob("*.kvlog"))
    contents = [segment.read_bytes() for segment in segments]
    assert len(segments) > 3
    for segment in segments[:-1]:
        segment.write_bytes(b"not a segment")
    with KVCacheManager(config(), log=LogWriter(tmp_path / "log", resume=True)) as manager:
        assert manager.add_sequence("again", [1, 2, 3]).handle == first_number(1)
        assert manager.state.next_transfer == first_number(1)
    for segment, content in zip(segments, contents, strict=True):
        if segment != segments[-1]:
            segment.write_bytes(content)
    assert len(set(handles_in(tmp_path / "log"))) == len(handles_in(tmp_path / "log"))
    assert replay(tmp_path / "log", verify=True).state.epoch == 1


def test_resumed_sequences_keep_their_handles(tmp_path: Path) -> None:
    """What ran when a log ended runs on under its old handle in the next epoch, beside new ones of that epoch."""
    recorded(tmp_path / "log", steps=40)
    state = replay(tmp_path / "log").state
    assert state.sequences
    running = dict(state.handles)
    manager = KVCacheManager.resume(state, log=LogWriter(tmp_path / "log", resume=True))
    assert manager.state.handles == running
    assert manager.add_sequence("new", [1, 2, 3]).handle == first_number(1)
    manager.add_tokens([*running, "new"], [1] * (len(running) + 1))
    manager.check()
    manager.close()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.state.handles == {**running, "new": first_number(1)}
    assert not replayed.checkpoints_failed


def test_state_of_a_later_epoch_in_a_new_log(tmp_path: Path) -> None:
    """A new log that begins with a state from the fifth epoch of another one begins with that epoch's number."""
    number = first_number(5) + 10
    with resumed(at_number(handle=number), log=tmp_path / "log") as manager:
        assert manager.add_sequence("a", [1, 2]).handle == number
        assert manager.state.next_transfer == first_number(5)
    for epoch in (6, 7):
        with KVCacheManager(config(), log=LogWriter(tmp_path / "log", resume=True)) as manager:
            assert manager.add_sequence("a", [1, 2]).handle == first_number(epoch)
    events = [event for batch in LogReader(tmp_path / "log") for event in batch.events]
    started = [event for event in events if isinstance(event, EpochStarted)]
    assert [(event.epoch, event.previous_epoch) for event in started] == [(5, None), (6, 5), (7, 6)]
    exported = [event.next_handle for event in events if isinstance(event, StateExported)]
    assert exported == [number, first_number(6), first_number(7)]
