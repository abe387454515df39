"""Logs as released versions have written them, kept as they are: every later version reads them to the same states.

`tests/golden/log_1` was written when format 1 was released, by a random program with all kinds of events of a cache but
`TransferFailed`, over several lives of two caches; `log_1z` is the same with compressed segments; `log_1.json` has the
fingerprint of the state after each batch. A new format gets logs of its own beside them.
"""

from __future__ import annotations

import json
import shutil
import typing
from pathlib import Path

import pytest

from events import AnyEvent
from events.log import LogReader, LogWriter
from events.log.frames import VERSION
from events.types import FORMAT_VERSION, TransferFailed
from kvcache.keep.verify import verify
from kvcache.replay import replay
from tests.support.logs.kept import states_of
from tests.support.places import ROOT
from tests.support.seeds import seeds

GOLDEN = ROOT / "tests" / "golden"
LOGS = ["log_1", "log_1z"]
FINGERPRINTS: dict[str, str] = json.loads((GOLDEN / "log_1.json").read_text())["fingerprints"]


@pytest.fixture(params=LOGS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, since checkouts give files other modes, and reading may leave locks."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "log"))


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
    of_feeds = {kind for kind in typing.get_args(AnyEvent) if "feed" in kind.__module__}
    assert kinds == {*typing.get_args(AnyEvent)} - of_feeds - {TransferFailed}
    assert (VERSION, FORMAT_VERSION) == (1, 1)


def test_compressed_or_not_the_batches_are_the_same() -> None:
    """Those of `log_1z` are `log_1`'s."""
    plain, compressed = (list(LogReader(GOLDEN / name)) for name in LOGS)
    assert plain == compressed
    assert list((GOLDEN / "log_1z").glob("*.kvlogz"))
