"""Which sinks get token ids: what each says that it needs, and what the log's setting says of the others."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from events.codec import batch_without_tokens
from events.log import LogWriter, writer
from events.size import batch_bytes
from events.types import EventBatch
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.record import outputs
from sinks import SinkRunner, runner
from tests.oracles.json_reader import from_json
from tests.support.feeds.sinks import PLANTED, RecordingSink

PACKED = PLANTED.to_bytes(4, "little")


class Saying(RecordingSink):
    """Says what it needs."""

    def __init__(self, needs_tokens: bool | None) -> None:
        super().__init__()
        self.needs_tokens = needs_tokens


def config(*, record_tokens: bool) -> KVCacheConfig:
    log = {"record_tokens": record_tokens, "fsync": "never", "overflow": "block"}
    return KVCacheConfig.load(max_sequence_length=64, tokens_per_block=4, primary_blocks=16, log=log)


def play(record_tokens: bool, sinks: list[Any], log: Any = None) -> list[EventBatch]:
    """A prompt with a planted token, and one that was sampled; returns what a sink got that needs all."""
    whole = Saying(True)
    with KVCacheManager(config(record_tokens=record_tokens), sinks=[*sinks, whole], log=log) as manager:
        manager.add_sequence("r", [PLANTED] * 9)
        manager.flush()
        manager.store_context_blocks("r", 9)
        manager.add_tokens(["r"], [PLANTED])
        manager.flush()
    return whole.stream


def holds_tokens(stream: list[EventBatch]) -> bool:
    return any(
        PACKED in (getattr(event, "tokens", None) or b"") for batch in stream for event in batch.events
    )


def test_a_batch_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log and sinks are told the size of the batch, whether or not they get its tokens."""
    measured: list[EventBatch] = []

    def measure(batch: EventBatch) -> int:
        measured.append(batch)
        return batch_bytes(batch)

    for user in (outputs, runner, writer):
        monkeypatch.setattr(user, "batch_bytes", measure)
    stream = play(True, [Saying(True), Saying(None)], tmp_path / "log")
    assert measured == stream
    del measured[:]
    assert len(play(True, [Saying(False), Saying(False)], tmp_path / "other")) == len(measured)


@pytest.mark.parametrize("with_log", [False, True])
@pytest.mark.parametrize(
    ("needs", "record_tokens", "gets"),
    [
        (True, True, True),
        (True, False, True),
        (False, True, False),
        (False, False, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_a_sink_gets_what_it_needs(
    tmp_path: Path, needs: bool | None, record_tokens: bool, gets: bool, with_log: bool
) -> None:
    """True and False hold whatever the log records; who says nothing gets what the log gets."""
    plain = RecordingSink()
    saying = Saying(needs)
    under_runner = Saying(needs)
    runner = SinkRunner(under_runner, "made by hand")
    whole = play(record_tokens, [plain, saying, runner], tmp_path / "log" if with_log else None)
    assert holds_tokens(whole)
    expected = whole if gets else [batch_without_tokens(batch) for batch in whole]
    assert saying.stream == under_runner.stream == expected
    assert holds_tokens(saying.stream) is gets
    assert holds_tokens(plain.stream) is record_tokens


def test_a_log_that_was_passed_decides(tmp_path: Path) -> None:
    """A LogWriter has settings of its own, and config.log is not used."""
    for number, records in enumerate((False, True)):
        plain = RecordingSink()
        play(not records, [plain], LogWriter(tmp_path / str(number), record_tokens=records))
        assert holds_tokens(plain.stream) is records


@pytest.mark.parametrize("record_tokens", [False, True])
@pytest.mark.parametrize(("options", "gets"), [("", False), ("?tokens=0", False), ("?tokens=1", True)])
def test_files_get_tokens_where_their_url_says_so(
    tmp_path: Path, record_tokens: bool, options: str, gets: bool
) -> None:
    """The URL of a file decides, whatever the log records."""
    path = tmp_path / "events.jsonl"
    whole = play(record_tokens, [f"file://{path}{options}"])
    assert (str(PLANTED) in path.read_text()) is gets
    if gets:
        assert [from_json(line) for line in path.read_bytes().splitlines()] == whole


@pytest.mark.parametrize("without", [0, 1, 3])
def test_tokens_are_taken_out_on_the_sinks_thread(monkeypatch: pytest.MonkeyPatch, without: int) -> None:
    """Each sink that must not get them has it done once a batch, and none on the engine's thread."""
    threads: list[threading.Thread] = []

    def strip(batch: EventBatch) -> EventBatch:
        threads.append(threading.current_thread())
        return batch_without_tokens(batch)

    monkeypatch.setattr(runner, "batch_without_tokens", strip)
    whole = play(True, [*(Saying(False) for _ in range(without)), RecordingSink()])
    assert len(threads) == len(whole) * without
    assert len(set(threads)) == without
    assert threading.main_thread() not in threads


def test_a_flush_makes_few_calls_on_the_engines_thread(tmp_path: Path) -> None:
    """With a log and a sink that gets no tokens: what can be done on their threads is done there."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    sinks = [f"file://{tmp_path}/events.jsonl"]
    with KVCacheManager(config(record_tokens=True), sinks=sinks, log=tmp_path / "log") as manager:
        manager.add_sequence("r", [PLANTED] * 9)
        manager.store_context_blocks("r", 9)
        for _ in range(20):
            manager.add_tokens(["r"], [PLANTED])
        sys.setprofile(note)
        try:
            manager.flush()
        finally:
            sys.setprofile(None)
    assert len(calls) <= 60, calls
