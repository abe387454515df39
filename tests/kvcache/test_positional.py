"""Groups of layers that share the pool of those with full attention, or have one of their own: what is told is what is
known, and replays.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events import types as ev
from events.codec import decode_batch, encode_batch
from events.ids import GroupIndex, Handle
from events.log import LogReader, LogWriter
from kvcache import KVCacheConfig, LayerGroup, Recorder
from kvcache.audit.tables import occupancy
from kvcache.errors import Contradiction, InvariantViolated, UsageError
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.state import CacheState
from kvcache.maintenance.prune import make_snapshot
from kvcache.maintenance.verify import verify
from kvcache.replay import replay
from tests.support.engines.hybrid_toy import FIRST, GROUPS, NAME_BYTES, HybridToy, key_of
from tests.support.logs.held_disk import HoldDisk
from tests.support.seeds import seeds
from tests.support.waiting import WAIT


@pytest.mark.parametrize("seed", seeds(range(300), quick=12))
def test_random_programs(tmp_path: Path, seed: int) -> None:
    """After each call the state is that of plain dictionaries, and the log replays to it from any exported state."""
    toy = HybridToy(seed, tmp_path / "log")
    for _ in range(150):
        toy.act()
        toy.compare()
    again = CacheState()
    for event in (
        toy.recorder.state.created,
        toy.recorder.state.export(),
        *toy.recorder.state.export_shared(),
    ):
        assert event is not None
        again.apply(decode_batch(encode_batch(ev.EventBatch(0, 0, (event,)))).events[0])
    assert fingerprint(again) == fingerprint(toy.recorder.state)
    toy.recorder.close()
    primary = occupancy(toy.recorder.state)[0]
    held = toy.held()
    idle = toy.named() - held
    assert (primary.held, primary.unreferenced, primary.blank) == (len(held), len(idle), len(toy.free()))
    stats = toy.recorder.stats()
    assert (stats.blocks_blank[0], stats.blocks_unreferenced[0]) == (primary.blank, primary.unreferenced)
    replayed = replay(tmp_path / "log", verify=True)
    replayed.check()
    assert replayed.fingerprint == fingerprint(toy.recorder.state)
    assert not replayed.checkpoints_failed
    assert replayed.checkpoints_verified
    assert verify(tmp_path / "log").damage == []


def test_the_programs_do_everything() -> None:
    """A long one does."""
    toy = HybridToy(0, None)
    for _ in range(400):
        toy.act()
    assert all(
        toy.seen[what]
        for what in ("add", "take", "reuse", "leave", "name", "unname", "end", "flush", "cleared")
    )


def test_snapshots_have_all_groups(tmp_path: Path) -> None:
    """A snapshot has what the groups have, and the log agrees with it."""
    toy = HybridToy(3, tmp_path / "log")
    for _ in range(300):
        toy.act()
    toy.recorder.close()
    expected = fingerprint(toy.recorder.state)
    assert make_snapshot(tmp_path / "log") is not None
    assert replay(tmp_path / "log", verify=True).fingerprint == expected
    assert verify(tmp_path / "log").problems == []


def test_what_was_lost_is_sent_again(tmp_path: Path, hold_disk: HoldDisk) -> None:
    """Behind batches that a log could not take stands all that the groups have."""
    with LogWriter(tmp_path / "log", overflow="drop", max_queued_batches=1) as log:
        toy = HybridToy(8, log)
        while len(toy.names) < 3:
            toy.act()
        toy.recorder.flush()
        log.flush()
        with hold_disk() as hangs:
            toy.recorder.deferred("first", group=3)
            toy.recorder.flush()
            assert hangs.wait(WAIT)
            for number in range(30):
                toy.recorder.deferred(number, group=3)
                toy.recorder.flush()
        log.flush()
        toy.recorder.deferred("last", group=3)
        toy.recorder.flush()
        for _ in range(60):
            toy.act()
            toy.compare()
            log.flush()
        toy.recorder.close()
    events = [event for batch in LogReader(tmp_path / "log") for event in batch.events]
    assert any(isinstance(event, ev.Gap) for event in events)
    reported = [event for event in events if isinstance(event, ev.PoolShared)]
    assert len(reported) > 1
    assert any(group.keys for shared in reported[1:] for group in shared.groups)
    assert replay(tmp_path / "log", verify=True).fingerprint == fingerprint(toy.recorder.state)


def recorder(**options: Any) -> Recorder:
    config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, max_sequence_length=32)
    given: dict[str, Any] = {"name_bytes": NAME_BYTES, "groups": GROUPS} | options
    return Recorder(config, engine="toy", first_block_id=FIRST, **given)


KEY = key_of([1, 2, 3, 4])


def with_one() -> Recorder:
    """Request a has blocks 1 in group 0, 2 in group 1 at index 0, which has a name, and 3 in group 3 at index 0; and 2
    of the other pool in group 4 at index 0.
    """
    made = recorder()
    made.admitted("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    made.allocated("a", [1])
    made.taken("a", [0], [2], group=1)
    made.named("a", [2], KEY, [4], group=1)
    made.taken("a", [0], [3], group=3)
    made.taken("a", [0], [2], group=4)
    made.admitted("b", [1, 2, 3, 4, 9])
    return made


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda r: r.taken("a", [1], [1], group=1), "request 'a' holds it|holds it"),
        (lambda r: r.taken("a", [1], [3], group=1), "holds it in group 3"),
        (lambda r: r.taken("a", [0], [4], group=1), "already has a block at index 0"),
        (lambda r: r.taken("b", [0], [4], group=1, reused=True), "has no name there"),
        (lambda r: r.taken("b", [1], [2], group=1, reused=True), "has no name there"),
        (lambda r: r.taken("b", [0], [2], group=1), "in group 1"),
        (lambda r: r.allocated("b", [3]), "in group 3"),
        (lambda r: r.admitted("c", [1], onboarded=[], onto=[2]), "in group 1"),
        (lambda r: r.left("a", [1], group=1), "has no block at index 1"),
        (lambda r: r.named("b", [2], KEY, [4], group=1), "which it does not hold"),
        (lambda r: r.named("a", [2], KEY, [4], group=1), "a name that it already has"),
        (lambda r: r.named("a", [3], key_of([]), [10], group=3), "has 9 tokens"),
        (lambda r: r.named("a", [3], key_of([]), [0], group=3), "no name for position 0"),
        (lambda r: r.unnamed([3], KEY, group=3), "does not have the name"),
        (lambda r: r.unnamed([2, 2], [KEY, KEY], group=1), "does not have the name"),
        (lambda r: r.taken("a", [1], [9], group=1), "unknown block 9"),
        (lambda r: r.taken("a", [1], [11], group=4), "unknown block 11"),
        (lambda r: r.taken("b", [0], [2], group=4), "a request holds it in group 4"),
        (lambda r: r.taken("b", [0, 1], [3, 3], group=4), "to request 'b' twice"),
        (lambda r: r.left("a", [1], group=4), "has no block at index 1"),
        (lambda r: r.named("a", [3], KEY, [4], group=4), "which it does not hold"),
        (lambda r: r.unnamed([2], KEY, group=4), "does not have the name"),
    ],
)
def test_what_cannot_be_true(call: Any, error: str) -> None:
    """Is refused, and leaves no trace."""
    made = with_one()
    made.flush()
    before = fingerprint(made.state)
    with pytest.raises(Contradiction, match=error):
        call(made)
    assert fingerprint(made.state) == before
    assert made.flush() is None
    made.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda r: r.taken("a", [1], [4], group=0),
        lambda r: r.taken("a", [1], [4], group=5),
        lambda r: r.taken("a", [1, 1], [4, 5], group=1),
        lambda r: r.taken("a", [1, 2], [4], group=1),
        lambda r: r.taken("a", [-1], [4], group=1),
        lambda r: r.taken("a", [2**40], [4], group=1),
        lambda r: r.taken("c", [1], [4], group=1),
        lambda r: r.left("a", [0, 0], group=1),
        lambda r: r.named("a", [2], KEY[:-1], [4], group=1),
        lambda r: r.unnamed([2], KEY, group=1, why="for fun"),
        lambda r: r.deferred("c", group=0),
    ],
)
def test_what_no_engine_says(call: Any) -> None:
    """Is refused, and leaves no trace."""
    made = with_one()
    made.flush()
    with pytest.raises(UsageError) as caught:
        call(made)
    assert not isinstance(caught.value, Contradiction)
    assert made.flush() is None


@pytest.mark.parametrize(
    "options",
    [
        {"name_bytes": None},
        {"groups": [("sliding", 4, 8)]},
        {"groups": [LayerGroup("sliding", 4)]},
        {"groups": [LayerGroup("state", 0)]},
        {"groups": [LayerGroup("banded", 4)]},  # type: ignore[arg-type]
        {"groups": [LayerGroup("state", -4)]},
        {"groups": [LayerGroup("state", 4, blocks=-1)]},
    ],
)
def test_groups_that_cannot_be(options: Any) -> None:
    """Are refused at the start."""
    with pytest.raises(UsageError):
        recorder(**options)


def test_uncached_groups_have_no_names() -> None:
    """Nobody finds what they have."""
    made = recorder(groups=[LayerGroup("uncached", 4)])
    made.admitted("a", [1, 2, 3, 4, 5])
    made.taken("a", [0], [2], group=1)
    with pytest.raises(UsageError, match="blocks of group 1 have no names"):
        made.named("a", [2], KEY, [4], group=1)


def test_without_further_groups_nothing_is_reported_of_them(tmp_path: Path) -> None:
    """A log of one group has none of the new events."""
    made = recorder(groups=(), log=tmp_path / "log")
    made.admitted("a", [1, 2, 3, 4, 5])
    made.close()
    kinds = {type(event).__name__ for batch in LogReader(tmp_path / "log") for event in batch.events}
    assert "PoolShared" not in kinds


def lied(change: Any) -> None:
    made = with_one()
    (shared,) = made.state.export_shared()
    state = CacheState()
    assert made.state.created is not None
    for event in (made.state.created, made.state.export(), change(shared)):
        state.apply(event)


def of_group(shared: ev.PoolShared, index: int, **changes: Any) -> ev.PoolShared:
    groups = list(shared.groups)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return ev.PoolShared(tuple(groups))


def test_exported_states_are_checked() -> None:
    """What no cache has is refused."""
    lied(lambda shared: shared)
    for changes in (
        {"kind": "banded"},
        {"tokens_per_block": 0},
        {"window": 0},
        {"slots": array("i", [0]).tobytes()},  # group 0's
        {"slots": array("i", [2]).tobytes()},  # group 3's
        {"slots": array("i", [9]).tobytes()},
        {"handles": array("q", [99]).tobytes()},
        {"keys": b""},
        {"positions": array("I", [0]).tobytes()},
        {"blocks": -1},
        {"blocks": 4},  # its slot 1 is not among these
    ):
        with pytest.raises((InvariantViolated, ValueError)):
            lied(lambda shared, changes=changes: of_group(shared, 0, **changes))


@pytest.mark.parametrize("positions", [[], [4], [4, 8], [4, 8, 8]])
def test_names_have_a_position_each(positions: list[int]) -> None:
    """An event with more or fewer of them than names is refused."""
    state = with_one().state
    (group, *_), handle = state.positional, Handle(state.handles["a"])
    slot = group.tables[handle][0]
    keys = key_of([5]), key_of([6])
    columns = array("i", [slot, slot]).tobytes(), b"".join(keys), array("I", positions).tobytes()
    event = ev.SlotsNamed(handle, GroupIndex(1), *columns)
    if len(positions) == len(keys):
        state.apply(event)
        assert group.names[slot] == {KEY: 4, keys[0]: 4, keys[1]: 8}
    else:
        with pytest.raises((InvariantViolated, ValueError)):
            state.apply(event)


def test_names_made_here(tmp_path: Path) -> None:
    """Blocks of a group have the names that the recorder makes of those that full attention has cached."""
    made = recorder(name_bytes=None, log=tmp_path / "log")
    made.admitted("a", list(range(10)))
    made.allocated("a", [1, 2, 3])
    made.taken("a", [0, 1], [1, 2], group=4)
    with pytest.raises(Contradiction, match="no cached block that ends at 4"):
        made.named("a", [1], None, [4], group=4)
    made.stored("a", 2)
    made.named("a", [1, 2], None, [4, 8], group=4)
    (run,) = made.state.groups[0].tree.runs.values()
    names = [name for slot in (8, 9) for name in made.state.positional[3].names[slot]]
    assert b"".join(names) == bytes(run.keys)
    made.ended("a")
    made.admitted("b", list(range(9)), [1, 2])
    made.taken("b", [1], [2], group=4, reused=True)
    made.unnamed([1], None, "b", group=4)
    with pytest.raises(Contradiction, match="does not have the name"):
        made.unnamed([1], None, group=4)
    made.check()
    made.close()
    assert replay(tmp_path / "log", verify=True).fingerprint == fingerprint(made.state)
