"""Logs as released versions have written them, kept as they are: every later version reads them to the same states.

`tests/golden/log_1` was written when format 1 was released, by a random program with all kinds of events of a cache but
`TransferFailed` and `LoadFailed`, over several lives of two caches; `log_1z` is the same with segments compressed as
format 1 had them, which are converted before they are read; `log_2` the same in format 2, compressed; `log_1.json` has
the fingerprint of the state after each batch. A new format gets logs of its own beside them.
"""

from __future__ import annotations

import json
import shutil
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from events import AnyEvent
from events.errors import LogOutdated
from events.log import LogReader, LogWriter
from events.log.frames import VERSION
from events.log.retention import Limits, LogParts
from events.types import (
    FEED_EVENTS,
    FIRST_FORMAT,
    HitDeferred,
    LoadFailed,
    PoolShared,
    SlotsLeft,
    SlotsNamed,
    SlotsTaken,
    SlotsUnnamed,
    TransferFailed,
)
from kvcache.maintenance.compress import compress
from kvcache.maintenance.prune import prune
from kvcache.maintenance.verify import verify
from kvcache.replay import replay
from tests.support.logs.kept import states_of
from tests.support.places import ROOT
from tests.support.seeds import seeds

GOLDEN = ROOT / "tests" / "golden"
LOGS = ["log_1", "log_1z", "log_2"]
FINGERPRINTS: dict[str, str] = json.loads((GOLDEN / "log_1.json").read_text())["fingerprints"]


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, since checkouts give files other modes, and reading may leave locks."""
    log = Path(shutil.copytree(GOLDEN / request.param, tmp_path / "log"))
    if request.param == "log_1z":
        compress(log)
    return log


def test_it_has_the_same_states(log: Path) -> None:
    """After each batch."""
    assert {str(seq): fingerprint.hex() for seq, fingerprint in states_of(log).items()} == FINGERPRINTS


@pytest.mark.parametrize("first", seeds(range(10), quick=1))
def test_it_replays_to_the_same_states(log: Path, first: int) -> None:
    """At every batch, from the beginning as from its snapshot."""
    for seq, fingerprint in list(FINGERPRINTS.items())[first::10]:
        assert replay(log, int(seq)).fingerprint.hex() == fingerprint
        assert replay(log, int(seq), verify=True).fingerprint.hex() == fingerprint


def test_it_is_whole(log: Path) -> None:
    """As the independent reader sees it; and a writer goes on."""
    assert verify(log).damage == []
    with LogWriter(log, resume=True) as writer:
        assert writer.next_seq == int([*FINGERPRINTS][-1]) + 1


def test_it_holds_all_kinds_of_events() -> None:
    """And the versions are those that it was written with, until there are logs of newer ones."""
    kinds = {type(event) for batch in LogReader(GOLDEN / "log_1") for event in batch.events}
    newer = {PoolShared, SlotsTaken, SlotsLeft, SlotsNamed, SlotsUnnamed, HitDeferred}
    assert kinds == {*typing.get_args(AnyEvent)} - {*FEED_EVENTS} - newer - {TransferFailed, LoadFailed}
    assert (VERSION, FIRST_FORMAT) == (2, 1)


def test_compressed_or_not_the_batches_are_the_same() -> None:
    """Those of `log_2` are `log_1`'s."""
    assert list(LogReader(GOLDEN / "log_1")) == list(LogReader(GOLDEN / "log_2"))
    assert all(part.is_compressed for part in LogParts(GOLDEN / "log_2").parts[:-1])


@pytest.mark.parametrize("use", [lambda log: list(LogReader(log)), verify, replay])
def test_what_an_earlier_version_has_compressed_is_converted_first(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    """Who comes upon it says how; a writer goes on without."""
    log = Path(shutil.copytree(GOLDEN / "log_1z", tmp_path / "log"))
    with pytest.raises(LogOutdated, match="convert the log with `kvcache log compress`"):
        use(log)
    with LogWriter(log, resume=True) as writer:
        assert writer.next_seq == int([*FINGERPRINTS][-1]) + 1
    assert compress(log).left == 0
    use(log)


def test_converting_that_was_interrupted(tmp_path: Path) -> None:
    """Of a segment that is there in both forms the new one counts, and both go when it goes."""
    log = Path(shutil.copytree(GOLDEN / "log_1z", tmp_path / "log"))
    compress(log)
    outdated = [path.name for path in (GOLDEN / "log_1z").glob("*.kvlogz")]
    for name in outdated:
        (log / name).write_bytes(b"not the same")
    assert verify(log).damage == []
    assert list(LogReader(log)) == list(LogReader(GOLDEN / "log_1"))
    again = Path(shutil.copytree(log, tmp_path / "again"))
    prune(log, Limits(segments=1))
    assert compress(again).left == 0
    assert not list(again.glob("*.kvlogz"))
    assert len(list(log.glob("*.kvlogz"))) < len(outdated)


def test_what_is_damaged_is_not_converted(tmp_path: Path) -> None:
    """It stays, and is told; the others are converted."""
    log = Path(shutil.copytree(GOLDEN / "log_1z", tmp_path / "log"))
    path = sorted(log.glob("*.kvlogz"))[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert compress(log).left == 1
    assert list(log.glob("*.kvlogz")) == [path]
    assert path.read_bytes() == bytes(data)
