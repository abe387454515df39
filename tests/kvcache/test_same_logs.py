"""Random programs lead to the logs that they led to when `tests/golden/same_logs.json` was written, byte for byte.

Decisions, their order and their events are a promise: an engine that is updated evicts, matches and publishes as
before. Where that is changed on purpose, `python -m tests.kvcache.test_same_logs` writes the file anew.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from events.codec import encode_batch
from events.log import LogReader
from events.types import CacheCreated, EventBatch
from kvcache.replay import replay
from tests.support.logs.random_logs import write_random_log
from tests.support.places import ROOT

GOLDEN = ROOT / "tests" / "golden" / "same_logs.json"
SEEDS = range(24)


def digest(log: Path) -> str:
    """SHA-256 of all batches, without the settings, and of the state to which they lead."""
    whole = hashlib.sha256()
    for batch in LogReader(log):
        whole.update(_encoded(_without_settings(batch)))
    whole.update(replay(log).state.epoch.to_bytes(8, "big"))
    whole.update(replay(log).fingerprint)
    return whole.hexdigest()


def _without_settings(batch: EventBatch) -> EventBatch:
    events = tuple(
        msgspec.structs.replace(event, config="") if isinstance(event, CacheCreated) else event
        for event in batch.events
    )
    return msgspec.structs.replace(batch, events=events)


LATER = {"SequenceRemoved": [None]}
"""Fields at the ends of events that have come since, as they are where nobody asks for them: older logs lack them."""


def _encoded(batch: EventBatch) -> bytes:
    seq, ts, events = msgspec.msgpack.decode(encode_batch(batch))
    for event in events:
        later = LATER.get(event[0], [])
        if later:
            assert event[-len(later) :] == later
            del event[-len(later) :]
    return msgspec.msgpack.encode([seq, ts, events])


def log_of(seed: int, directory: Path) -> Path:
    return write_random_log(seed, directory / "log", branches=seed % 2 == 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_program_leads_to_the_same_log(seed: int, tmp_path: Path) -> None:
    """All events of every batch, and the state."""
    assert digest(log_of(seed, tmp_path)) == json.loads(GOLDEN.read_text(encoding="utf-8"))[seed]


if __name__ == "__main__":
    found = []
    for seed in SEEDS:
        with TemporaryDirectory() as parent:
            found.append(digest(log_of(seed, Path(parent))))
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
