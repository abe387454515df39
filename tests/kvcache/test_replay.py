"""A log folds to the state that wrote it, at every batch, and says where it cannot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from events.ids import first_number
from events.log import LogReader, LogWriter
from events.types import BlocksStored, Checkpoint, EpochStarted, EventBatch, SequenceAdded
from kvcache.errors import ConfigError, InvariantViolated, Unsupported
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.record.journal import cache_created
from kvcache.record.outputs import open_log
from kvcache.replay import BeyondEnd, InLogGap, Unreplayable, fold, replay
from tests.support.engines import strategies
from tests.support.engines.inside import blocks_of, journal_of
from tests.support.engines.traffic import Traffic, config, lossy, recorded
from tests.support.seeds import seeds


@pytest.mark.parametrize("seed", seeds(range(4), quick=1))
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_log_replays_to_every_state(tmp_path: Path, seed: int, tokens: bool) -> None:
    """At each batch the folded log has the live state's fingerprint and keeps all laws, also without token ids."""
    log = {"record_tokens": tokens, "fsync": "never", "overflow": "block"}
    fingerprints = recorded(tmp_path / "log", seed, log=log)
    for seq, expected in fingerprints.items():
        replayed = replay(tmp_path / "log", seq, verify=True)
        assert (replayed.last_seq, replayed.fingerprint) == (seq, expected)
        replayed.state.check()
        assert replayed.checkpoints_failed == []
    whole = replay(tmp_path / "log", verify=True)
    assert whole.fingerprint == fingerprints[max(fingerprints)]
    assert whole.checkpoints_verified >= 2
    assert whole.end is not None
    assert whole.end.kind == "clean"


def test_log_without_tokens_and_names_is_refused(tmp_path: Path) -> None:
    """Nothing would tell its blocks apart: it is refused before the first event, in the settings and as a writer."""
    with pytest.raises(
        ConfigError, match=r"block_hash: given 'none'; accepted: another one with log.record_tokens"
    ):
        config(block_hash="none", log={"record_tokens": False})
    with LogWriter(tmp_path / "log", record_tokens=False) as log:
        with pytest.raises(Unsupported, match="a log with neither tokens nor block names"):
            KVCacheManager(config(block_hash="none"), log=log)
        assert log.batches_written == 0
    created = cache_created(config(block_hash="none"), Layout.of(config()), published=False)
    state = CacheState()
    state.apply(EpochStarted(1, bytes(16), None, None, True, False, ""))
    with pytest.raises(InvariantViolated, match="neither tokens nor names"):
        state.apply(created)


def test_equal_runs_write_equal_events(tmp_path: Path) -> None:
    """The same commands make the same batches but for the clock and the log's own id."""
    for name in ("one", "other"):
        recorded(tmp_path / name)
    one, other = ([batch.events for batch in LogReader(tmp_path / name)] for name in ("one", "other"))
    assert one[1:] == other[1:]


def test_replay_goes_on_deciding(tmp_path: Path) -> None:
    """A manager on the replayed state answers further commands with the events of the one that wrote the log."""
    manager = KVCacheManager(config(), log=tmp_path / "log")
    traffic = Traffic(manager, 5)
    traffic.record(60)
    manager.flush()
    journal_of(manager).outputs.log.flush(10)  # type: ignore[union-attr]
    events = [event for batch in LogReader(tmp_path / "log") for event in batch.events]
    twin = strategies.continue_from(config(), *events)
    other = Traffic(twin, 5)
    other.running, other.next_id = list(traffic.running), traffic.next_id
    other.random.setstate(traffic.random.getstate())
    for _ in range(60):
        traffic.step()
        other.step()
        assert twin.bus.pending[-5:] == manager.bus.pending[-5:]
        assert twin.fingerprint() == manager.fingerprint()
    assert twin.bus.pending == manager.bus.pending
    assert len(manager.bus.pending) > 60
    manager.close()


def test_batches_beyond_the_end_are_refused(tmp_path: Path) -> None:
    """Asking for a state that the log does not reach names its last batch."""
    last = max(recorded(tmp_path / "log"))
    with pytest.raises(BeyondEnd) as raised:
        replay(tmp_path / "log", last + 1)
    assert (raised.value.seq, raised.value.last_seq) == (last + 1, last)


def test_a_batch_that_was_lost_is_refused(tmp_path: Path) -> None:
    """Asking for a state in a gap names the last batch before it; behind the gap there is one again."""
    log = LogWriter(tmp_path / "log", overflow="drop", max_queued_batches=1)
    manager = KVCacheManager(strategies.config(), log=log)
    for step in range(400):
        if step == 399:
            log.flush()  # So there is room again.
        manager.add_sequence(step, [step])
        manager.remove_sequence(step)
        manager.flush()
    manager.close()
    there = [batch.seq for batch in LogReader(tmp_path / "log")]
    before, after = next((a, b) for a, b in itertools.pairwise(there) if b > a + 1)
    for lost in (before + 1, after - 1):
        with pytest.raises(InLogGap) as raised:
            replay(tmp_path / "log", lost)
        assert (raised.value.seq, raised.value.last_seq) == (lost, before)
    assert replay(tmp_path / "log", after).last_seq == after


def test_state_before_the_first_batch_is_empty(tmp_path: Path) -> None:
    """Folding up to before batch 0 gives a cache that was never created."""
    recorded(tmp_path / "log")
    replayed = replay(tmp_path / "log", -1)
    assert (replayed.last_seq, replayed.batches, replayed.state.created) == (-1, 0, None)


def batches_of(directory: Path) -> list[EventBatch]:
    recorded(directory)
    return list(LogReader(directory))


def test_wrong_checkpoints_are_reported(tmp_path: Path) -> None:
    """A checkpoint that disagrees with the fold is named by its batch when verifying, and ignored otherwise."""
    batches = batches_of(tmp_path / "log")
    at = next(
        n for n, batch in enumerate(batches) if any(isinstance(event, Checkpoint) for event in batch.events)
    )
    changed = tuple(
        msgspec.structs.replace(event, fingerprint=bytes(32)) if isinstance(event, Checkpoint) else event
        for event in batches[at].events
    )
    batches[at] = msgspec.structs.replace(batches[at], events=changed)
    assert fold(batches, verify=True).checkpoints_failed == [batches[at].seq]
    assert fold(batches, verify=False).checkpoints_failed == []


def test_changed_history_does_not_verify(tmp_path: Path) -> None:
    """If another token had been appended than the log's checkpoints saw, verification says so."""
    batches = batches_of(tmp_path / "log")
    # The last one: what continues a block names it.
    at, stored = [(n, e) for n, b in enumerate(batches) for e in b.events if isinstance(e, BlocksStored)][-1]
    forged = msgspec.structs.replace(stored, keys=bytes(len(stored.keys)))
    events = tuple(forged if event is stored else event for event in batches[at].events)
    batches[at] = msgspec.structs.replace(batches[at], events=events)
    assert fold(batches, verify=True).checkpoints_failed


@pytest.mark.parametrize("copies", [0, 2], ids=["lost", "twice"])
def test_batches_of_another_history_are_refused(tmp_path: Path, copies: int) -> None:
    """Wherever a batch with an admission is lost or doubled, folding stops there or a checkpoint disagrees."""
    batches = batches_of(tmp_path / "log")
    admitting = [
        n for n, batch in enumerate(batches) if any(isinstance(e, SequenceAdded) for e in batch.events)
    ]
    for at in admitting[:-1]:
        damaged = batches[:at] + [batches[at]] * copies + batches[at + 1 :]
        assert not passes(damaged)
    assert len(admitting) > 5


def passes(batches: Sequence[EventBatch]) -> bool:
    try:
        return not fold(batches, verify=True).checkpoints_failed
    except Unreplayable:
        return False


def test_folding_goes_on_after_a_gap() -> None:
    """After lost batches the state is exported, so the fold is right again, and the live manager is undisturbed."""
    manager = KVCacheManager(config())
    traffic = Traffic(manager, 3)
    assert manager.state.created is not None
    batches = [EventBatch(0, 0, (manager.state.created,))]
    traffic.record(40)  # lost
    manager.add_tokens(traffic.running, [0] * len(traffic.running))
    assert len(manager.bus.pending) > 1  # continues what is missing
    batches += lossy(manager, 1, 9)
    assert fold(batches).fingerprint == manager.fingerprint()
    for _ in range(60):
        traffic.step()
        manager.check()
        batch = manager.flush()
        if batch is not None:
            batches.append(batch)
    blocks_of(manager).housekeeping.checkpoint()  # it has no log, so it records none by itself
    last = manager.flush()
    assert last is not None
    replayed = fold([*batches, last], verify=True)
    assert replayed.fingerprint == manager.fingerprint()
    assert replayed.checkpoints_verified
    assert not replayed.checkpoints_failed
    assert [(gap.first_seq, gap.last_seq) for gap in replayed.gaps] == [(1, 9)]


def test_continued_log_starts_a_new_epoch(tmp_path: Path) -> None:
    """A second manager on the same log starts empty, uses no handle or transfer again, and all of it replays."""
    settings = config()
    recorded(tmp_path / "log")
    first = replay(tmp_path / "log").state
    manager = KVCacheManager(settings, log=open_log(tmp_path / "log", settings.log, resume=True))
    assert manager.num_sequences == 0
    assert strategies.cached_blocks(manager.state) == {}
    assert manager.add_sequence("again", [1, 2, 3]).handle == first_number(1)
    assert manager.state.next_transfer == first_number(1)
    manager.close()
    replayed = replay(tmp_path / "log", verify=True)
    assert replayed.state.epoch == first.epoch + 1
    assert replayed.fingerprint == fingerprint(manager.state)
    handles = [
        event.handle
        for batch in LogReader(tmp_path / "log")
        for event in batch.events
        if isinstance(event, SequenceAdded)
    ]
    assert len(set(handles)) == len(handles)


def test_progress_is_reported(tmp_path: Path) -> None:
    """Whoever waits for a replay hears of each batch."""
    recorded(tmp_path / "log")
    received: list[int] = []
    replayed = replay(tmp_path / "log", progress=received.append)
    assert received == list(range(replayed.last_seq + 1))
    assert replayed.batches == len(received)
