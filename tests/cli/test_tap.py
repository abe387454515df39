"""`kvcache tap`, and the commands that read what it records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import (
    AnyEvent,
    EventBatch,
    FeedCleared,
    FeedReceived,
    FeedRemoved,
    FeedStarted,
    FeedStored,
    WorkerSeen,
)
from kvcache.audit.histogram import Ages
from kvcache.tap.history import FeedHistory
from kvcache.tap.tap import Endpoint, Tap
from tests.support.commands import Kvcache, Start
from tests.support.feeds.publisher import Publisher, batch, removed, stored
from tests.support.feeds.tapped import work_until


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two workers: one has a prompt of four tokens, the other its first half; one has lost something before."""
    log = tmp_path / "taps"
    with (
        Publisher() as first,
        Publisher() as second,
        Tap([Endpoint(first.endpoint), Endpoint(second.endpoint)], log) as tap,
    ):
        first.wait_subscribed()
        second.wait_subscribed()
        first.send(0, batch(stored(10, 20)), b"kv@a@m")
        first.send(1, batch(stored(30, medium="CPU"), removed(30, medium="CPU"), stored(30)), b"kv@a@m")
        work_until(tap, lambda: tap.recorder.batches == 2)
        second.send(5, batch(stored(10)), b"kv@b@m")
        work_until(tap, lambda: tap.recorder.batches == 3)
    return log


def facts(kvcache: Kvcache, *words: Any) -> Any:
    done = kvcache(*map(str, words), "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_replay(kvcache: Kvcache, log: Path) -> None:
    """The table has the workers with their blocks, and what was lost; before, there was less."""
    said = facts(kvcache, "replay", log)
    assert said["kind"] == "feed"
    assert [(w["complete"], w["lost_batches"], w["places"]) for w in said["workers"]] == [
        (True, 0, [{"medium": "GPU", "group": 0, "blocks": 3}]),
        (False, 5, [{"medium": "GPU", "group": 0, "blocks": 1}]),
    ]
    [worker] = facts(kvcache, "replay", log, "--at", "1")["workers"]
    assert worker["places"][0]["blocks"] == 2
    assert "since its last loss" in kvcache("replay", str(log)).out


def test_match(kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
    """Each worker has the prompt as far as its blocks go; requests there are none."""
    prompt = tmp_path / "prompt"
    prompt.write_text("10 11 20 21 5")
    said = facts(kvcache, "match", log, "--tokens", prompt)
    assert [(w["resident_tokens"], w["media"]) for w in said["workers"]] == [(4, {"GPU": 2}), (2, {"GPU": 1})]
    assert "GPU 2" in kvcache("match", str(log), "--tokens", str(prompt)).out
    assert "give the prompt with --tokens" in kvcache("match", str(log), "--request", "1").err


def test_audit(kvcache: Kvcache, log: Path) -> None:
    """Blocks are counted when they come, come back, and are somewhere else already."""
    blocks = facts(kvcache, "audit", log)["blocks"]
    assert {
        key: blocks[key]
        for key in ("stored", "removed", "moved", "stored_again", "stored_elsewhere", "forgotten")
    } == {
        "stored": 4,
        "removed": 0,
        "moved": 1,
        "stored_again": 0,
        "stored_elsewhere": 1,
        "forgotten": 0,
    }
    assert blocks["held_by"] == {"1": 2, "2": 1}
    shown = kvcache("audit", str(log)).out
    assert "engines publish no requests" in shown
    assert "2 blocks in one worker each, 1 block in 2 workers each" in shown


def test_events(kvcache: Kvcache, log: Path) -> None:
    """Lines name the worker, and a block is found by its hash."""
    done = kvcache("events", str(log), "--block", f"{30:016x}")
    assert [line.split()[2] for line in done.out.splitlines()] == ["FeedStored", "FeedRemoved", "FeedStored"]
    assert "worker=tcp://127.0.0.1:" in done.out


def test_events_as_json_name_the_worker(kvcache: Kvcache, log: Path) -> None:
    """Beside its number, as lines for people do."""
    lines = [json.loads(line) for line in kvcache("events", str(log), "--json").out.splitlines()]
    stores = [line for line in lines if line["type"] == "FeedStored"]
    assert len({(line["worker"], line["worker_name"]) for line in stores}) == 2
    assert all(line["worker_name"].startswith("tcp://127.0.0.1:") for line in stores)
    assert not any("worker_name" in line for line in lines if "worker" not in line)


@pytest.mark.parametrize("word", ["--resume", "--continue"])
def test_a_log_that_is_there(kvcache: Kvcache, start: Start, log: Path, word: str) -> None:
    """It is said how to go on with it, in words of the command line."""
    done = kvcache("tap", "tcp://127.0.0.1:1", "--log", str(log))
    assert done.code == 2
    assert "choose another directory, or add --resume to continue it" in done.err
    process = start("tap", "tcp://127.0.0.1:1", "--log", log, word)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("kvcache: recording tcp://127.0.0.1:1 into")


@pytest.mark.parametrize("command", ["diff", "explain", "curve", "whatif", "export", "report"])
def test_others_refuse(kvcache: Kvcache, log: Path, tmp_path: Path, command: str) -> None:
    """A command about a cache says what this log is instead."""
    more: dict[str, list[Any]] = {
        "diff": [log],
        "explain": ["--request", "1"],
        "export": ["--to", "csv", "-o", tmp_path / "x"],
        "report": ["-o", tmp_path / "y.html"],
    }
    done = kvcache(command, str(log), *map(str, more.get(command, [])))
    assert done.code == 2
    assert "is a feed log" in done.err


def test_publish_refuses_what_cannot_be(kvcache: Kvcache, log: Path) -> None:
    """Two workers cannot share a feed, and nobody counts a cache that is not there."""
    done = kvcache("publish", str(log), "--once", "--sink", "zmq+pub://127.0.0.1:0")
    assert done.code == 2
    assert "choose it with engine=" in done.err
    sink = "zmq+pub://127.0.0.1:0?engine=tcp://nobody"
    done = kvcache("publish", str(log), "--once", "--sink", sink)
    assert done.code == 2
    assert "does not contain worker tcp://nobody; it has tcp://127.0.0.1:" in done.err
    assert "up to date" not in done.err
    lines = log.parent / "events.jsonl"
    done = kvcache("publish", str(log), "--once", "--sink", f"file:{lines}?tokens=1")
    assert done.code == 0
    assert lines.read_text().count('"FeedStored"') == 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "--replay", "tcp://127.0.0.1:3"],
            "--replay is for a single ENDPOINT",
        ),
        (["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"], "given twice"),
        (["tcp://*:0", "--replay", "tcp://127.0.0.1:3"], "--replay topic"),
        (["tcp://no-such-host.invalid:1"], "cannot be found"),
        (["tcp://127.0.0.1"], "it has no port"),
        (["file:e.jsonl", "file:e.jsonl"], "given twice"),
        (
            ["nats://kv:SECRET@127.0.0.1/s"],
            "nats:…@127.0.0.1/s: tap reads engines and files, not brokers; use `kvcache subscribe`",
        ),
        (["rediss://kv:SECRET@127.0.0.1/s?x=y"], "rediss:…@127.0.0.1/s: an endpoint has no user or password"),
        (["file:e.jsonl?format=vllm"], "valid options are format=trtllm"),
    ],
)
def test_wrong_arguments(kvcache: Kvcache, tmp_path: Path, words: list[str], reason: str) -> None:
    """Each is refused before a log is made, with what to do."""
    done = kvcache("tap", *words, "--log", str(tmp_path / "log"))
    assert done.code == 2
    assert reason in done.err


def test_history_over_epochs(log: Path) -> None:
    """What an audit counts is what happened, and its residency that of the fold."""
    history = FeedHistory()
    for each in LogReader(log, kind="feed"):
        history.fold(each)
    there = sum(worker.num_blocks for worker in history.state.workers.values())
    assert history.stored - history.removed - history.forgotten == there
    assert history.lifetimes.total == history.removed


SECOND = 1_000_000_000


def batch_received(seq: int, published: int, *said: AnyEvent) -> EventBatch:
    """A batch that the tap heard a long time after it was published, as by a replay."""
    received = FeedReceived(worker=0, number=seq, published_ts=published * SECOND, replayed=True)
    return EventBatch(seq, 10_000 * SECOND + seq, (received, *said))


def put(name: int, medium: str = "GPU") -> FeedStored:
    tokens = (1).to_bytes(4, "little")
    fields = {"parent_block_hash": None, "tokens": tokens, "block_size": 1, "medium": medium}
    return FeedStored(worker=0, block_hashes=(name,), **fields)  # type: ignore[arg-type]


def took(name: int, medium: str = "GPU") -> FeedRemoved:
    return FeedRemoved(worker=0, block_hashes=(name,), medium=medium)


def history_of(*batches: EventBatch) -> FeedHistory:
    history = FeedHistory()
    start = (FeedStarted(endpoints=()), WorkerSeen(worker=0, source="a", topic="", rank=0))
    for each in (EventBatch(0, 1, start), *batches):
        history.fold(each)
        there = sum(worker.num_blocks for worker in history.state.workers.values())
        assert history.stored - history.removed - history.forgotten == there
        assert history.lifetimes.total == history.removed
        assert set(history._since) == {
            (0, place, name) for place, blocks in history.state.workers[0].blocks.items() for name in blocks
        }
    return history


def seconds_of(ages: Ages) -> int:
    """Of the one that was counted, to a percent."""
    return round(ages.quantile(0.5) or 0)


def test_ages_are_by_the_clock_of_the_engine() -> None:
    """Batches that came by a replay were heard at one moment, and published at others."""
    history = history_of(
        batch_received(1, 100, put(1)), batch_received(2, 160, took(1)), batch_received(3, 190, put(1))
    )
    assert (seconds_of(history.lifetimes), seconds_of(history.gone_ages)) == (60, 30)


@pytest.mark.parametrize("order", [(took(1), put(1, "CPU")), (put(1, "CPU"), took(1))])
def test_a_block_that_changes_its_level_lives_on(order: tuple[AnyEvent, ...]) -> None:
    """Whichever is told first, it is neither removed nor back; it lives until it is nowhere."""
    history = history_of(batch_received(1, 100, put(1)), batch_received(2, 150, *order))
    assert (history.stored, history.removed, history.moved, history.stored_again) == (1, 0, 1, 0)
    history = history_of(
        batch_received(1, 100, put(1)), batch_received(2, 150, *order), batch_received(3, 170, took(1, "CPU"))
    )
    assert (history.removed, seconds_of(history.lifetimes)) == (1, 70)


def test_what_is_no_move() -> None:
    """The same level again; a copy elsewhere that stays or was there before; a batch later."""
    history = history_of(batch_received(1, 1, put(1)), batch_received(2, 2, took(1), put(1)))
    assert (history.stored, history.removed, history.moved, history.stored_again) == (2, 1, 0, 1)
    history = history_of(
        batch_received(1, 1, put(1)),
        batch_received(2, 2, put(1, "CPU")),
        batch_received(3, 3, took(1)),
        batch_received(4, 4, put(1)),
    )
    assert (history.stored, history.removed, history.moved, history.stored_again) == (3, 1, 0, 0)
    history = history_of(
        batch_received(1, 1, put(1)), batch_received(2, 2, took(1)), batch_received(3, 4, put(1, "CPU"))
    )
    assert (history.stored, history.removed, history.moved, history.stored_again) == (2, 1, 0, 1)
    history = history_of(
        batch_received(1, 1, put(1)), batch_received(2, 2, put(1, "CPU"), FeedCleared(0), put(1), took(1))
    )
    assert (history.moved, history.removed, history.forgotten) == (0, 1, 2)
