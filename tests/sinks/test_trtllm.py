"""What is cached as TensorRT-LLM's dicts in lines: beside what a manager keeps for who polls, and read back."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from events.errors import EventDecodeError
from events.formats.trtllm import EventDicts
from events.log import LogWriter
from events.subscribe.continuity import Missed, Received, Restarted
from events.subscribe.index import Index
from events.types import EventBatch, Gap
from kvcache import KVCacheManager
from kvcache.publish.errors import NoTokens
from kvcache.publish.publisher import Publisher
from kvcache.replay import replay
from kvcache.tap.lines import DictFollower
from sinks import SinkContext, SinkOpenError, SinkRunner, SinkURLError, open_sink
from sinks.trtllm import DictFeed, LineOutput, LineTransport
from tests.support.engines import strategies
from tests.support.feeds.strict import NoBytes
from tests.support.feeds.trtllm_events import FIRST, STREAM, WINDOWS, BusyEngine, Held, config, held_by, work
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, wait_until


class Reading:
    """An index of what lines say, and the reports beside batches."""

    def __init__(self) -> None:
        self.index, self.odd = Index(), list[Any]()
        self._follower = DictFollower()

    def take(self, lines: Iterable[bytes]) -> None:
        for report in (report for line in lines for report in self._follower.take(line)):
            self.index.fold(report)
            if not isinstance(report, Received):
                self.odd.append(report)


def read(lines: Iterable[bytes]) -> tuple[Index, list[Any]]:
    """What all of them say."""
    reading = Reading()
    reading.take(lines)
    return reading.index, reading.odd


def held_in(index: Index) -> Held:
    return {
        place: {name for name in blocks if isinstance(name, int)}
        for place, blocks in index.blocks.items()
        if blocks
    }


Book = dict[tuple[int, int], int]
"""(window, hash) to level."""


def note(kept: Book, lines: Iterable[bytes]) -> None:
    """Keep a book up to date as whoever looks at no numbers would."""
    for event in map(json.loads, lines):
        data, window = event["data"], event["window_size"]
        if data["type"] == "stored":
            kept.update(((window, block["block_hash"]), block["cache_level"]) for block in data["blocks"])
        elif data["type"] == "updated" and data["cache_level"] is not None:
            assert kept[window, data["block_hash"]] == data["cache_level"]["old_value"]
            kept[window, data["block_hash"]] = data["cache_level"]["new_value"]
        elif data["type"] == "removed":
            for name in data["block_hashes"]:
                kept.pop((window, name), None)


def book_of(manager: KVCacheManager) -> Book:
    """What such a one must have."""
    assert manager.state.created is not None
    groups = manager.state.created.groups
    held = held_by(manager).items()
    return {(groups[group].window, name): level for (group, level), names in held for name in names}


def stored_blocks(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int], Any]:
    """(window, hash) to what was said of a block and of the one before it."""
    found: dict[tuple[int, int], Any] = {}
    for event in events:
        if event["data"]["type"] == "stored":
            parent = event["data"]["parent_hash"]
            scope = (event["data"]["lora_id"], event["data"]["lora_name"])
            for block in event["data"]["blocks"]:
                found[event["window_size"], block["block_hash"]] = (parent, scope, block)
                parent = block["block_hash"]
    return found


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", seeds(range(6), quick=2))
def test_lines_are_what_is_reported_who_polls(
    tmp_path: Path, seed: int, windows: Sequence[int] | None
) -> None:
    """Dict by dict, in the same order, under the same numbers: one folds the state, the other the stream."""
    path = tmp_path / "e.jsonl"
    with KVCacheManager(config(windows), copier=NoBytes(), sinks=[f"file:{path}?format=trtllm"]) as manager:
        work(manager, seed)
        polled = manager.get_latest_events()
        held = held_by(manager)
    lines = path.read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(polled))
    kinds = {event["data"]["type"] for event in polled}
    assert kinds == {"created", "stored", "updated", "removed"}
    index, odd = read(lines)
    assert held_in(index) == held
    assert (odd, index.unknown_removals, index.unknown_events) == ([], 0, 0)
    assert index.repeated_stores == 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_offloads_and_what_blocks_are_read_back(tmp_path: Path, windows: Sequence[int] | None) -> None:
    """Batch by batch of a random run, a reader has what the manager has, by window and level, with its tokens."""
    path = tmp_path / "e.jsonl"
    manager = KVCacheManager(config(windows), copier=NoBytes(), sinks=[f"file:{path}?format=trtllm"])
    engine = BusyEngine(manager, random.Random(8))
    truth: list[Held] = []
    for _ in range(200):
        engine.step()
        manager.flush()
        if not truth or truth[-1] != held_by(manager):
            truth.append(held_by(manager))
    manager.close()
    index, follower = Index(), DictFollower()
    states = [held_in(index)]
    for line in path.read_bytes().splitlines():
        for report in follower.take(line):
            index.fold(report)
        states.append(held_in(index))
    # Each state of the manager is one that the reader goes through, in the same order.
    passing = iter(states)
    assert all(any(state == held for state in passing) for held in truth)
    assert sum(any(level for _, level in held) for held in truth) > 20, "nothing was in secondary"
    size = manager.config.tokens_per_block
    assert all(0 < len(block.tokens) <= size for blocks in index.blocks.values() for block in blocks.values())


def test_resumed_cache_reports_what_it_begins_with(tmp_path: Path) -> None:
    """A manager that goes on with a state tells all of it first, and the rest fits that."""
    settings = config((6, strategies.LIMIT))
    with KVCacheManager(settings, log=tmp_path / "log", copier=NoBytes()) as manager:
        engine = work(manager, 3)
        for number in engine.running:
            manager.remove_sequence(number)
    path = tmp_path / "e.jsonl"
    log = LogWriter(tmp_path / "log", resume=True)
    manager = KVCacheManager.resume(
        replay(tmp_path / "log").state, log=log, sinks=[f"file:{path}?format=trtllm"]
    )
    before = held_by(manager)
    assert any(level for _, level in before)
    polled = manager.get_latest_events()
    manager.add_sequence("new", [3, 4, 5, 6, 7])
    manager.store_context_blocks("new", 5)
    manager.flush()
    held = held_by(manager)
    manager.close()
    index, odd = read(path.read_bytes().splitlines())
    assert held_in(index) == held != before
    assert odd == []
    said = stored_blocks(map(json.loads, path.read_bytes().splitlines()))
    reported = stored_blocks(json.loads(json.dumps(polled)))
    assert len(reported) > 10
    assert {place: said[place] for place in reported} == reported


def inventory(manager: KVCacheManager) -> Iterator[EventBatch]:
    """Batches of a random run, of which the caller may leave out some."""
    assert manager.state.created is not None
    yield EventBatch(0, 0, (manager.state.created,))
    engine = BusyEngine(manager, random.Random(5))
    while True:
        engine.step()
        batch = manager.flush()
        if batch is not None:
            yield batch


class Lines(LineOutput):
    """An output in memory, which fails when it is told to."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.fails = 0

    def open(self) -> None:
        """Nothing to open."""

    def append(self, data: bytes) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(28, "full")
        assert data.endswith(b"\n")
        self.lines += data.splitlines()

    def close(self) -> None:
        """Nothing to close."""


def feed_into(lines: Lines, piece_bytes: int = 1 << 16) -> DictFeed:
    feed = DictFeed(LineTransport(lines, EventDicts(piece_bytes), has_names=True))
    feed.open()
    return feed


@pytest.mark.parametrize("windows", WINDOWS)
def test_lost_batches_cost_the_reader_nothing_once_the_state_comes(windows: Sequence[int] | None) -> None:
    """At the loss all is removed; with the whole state all is stored again, and goes on from there."""
    manager = KVCacheManager(config(windows), copier=NoBytes())
    lines = Lines()
    feed = feed_into(lines)
    batches, chance = inventory(manager), random.Random(1)
    for _ in range(5):
        for _ in range(chance.randrange(20, 40)):
            feed.write(next(batches))
            feed.tick()
        assert held_in(read(lines.lines)[0]) == held_by(manager)
        lost = [next(batches).seq for _ in range(3)]
        feed.write(EventBatch(lost[-1], 0, (Gap(lost[0], lost[-1], "overflow"),)))
        feed.resync()
        feed.tick()
        assert feed.resync_after_seq == lost[-1]
        assert held_in(read(lines.lines)[0]) == {}
        later = next(batches)
        feed.write(EventBatch(later.seq, 0, (*later.events, manager.state.export())))
        feed.tick()
        index, odd = read(lines.lines)
        assert held_in(index) == held_by(manager)
        assert (odd, index.unknown_removals) == ([], 0)
    numbers = [json.loads(line)["event_id"] for line in lines.lines]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("seed", seeds(range(5), quick=2))
def test_lines_that_could_not_be_written_are_made_good(seed: int) -> None:
    """Numbers are missing then, so a reader forgets; what comes next is all that is cached."""
    manager = KVCacheManager(config((6, strategies.LIMIT)), copier=NoBytes())
    lines, chance = Lines(), random.Random(seed)
    feed, batches, failures = feed_into(lines, 200), inventory(manager), 0
    reading, kept = Reading(), Book()
    for _ in range(150):
        lines.lines.clear()
        feed.write(next(batches))
        lines.fails = int(chance.random() < 0.1)
        try:
            feed.tick()
        except OSError:
            failures += 1
            feed.tick()
        lines.fails = 0
        reading.take(lines.lines)
        note(kept, lines.lines)
        assert held_in(reading.index) == held_by(manager)
        assert kept == book_of(manager)
    assert failures > 1
    assert {type(report) for report in reading.odd} == {Missed}


def test_queue_that_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that hangs for a while loses batches; the manager then gives it the whole state."""
    path = tmp_path / "e.jsonl"
    feed = open_sink(f"file:{path}?format=trtllm", SinkContext(32, 4))
    assert isinstance(feed, DictFeed)
    goes_on, write = threading.Event(), feed.write
    monkeypatch.setattr(feed, "write", lambda batch: (goes_on.wait(WAIT), write(batch)))
    runner = SinkRunner(feed, "lines", max_events=200)
    manager = KVCacheManager(config(None), copier=NoBytes(), sinks=[runner])
    work(manager, 2, 400)
    assert runner.stats().dropped_batches > 0
    goes_on.set()
    wait_until(lambda: feed.resync_after_seq is not None)
    wait_until(lambda: feed.resync_after_seq is None, meanwhile=manager.flush)
    held = held_by(manager)
    manager.close()
    assert held_in(read(path.read_bytes().splitlines())[0]) == held


class TestSidecar:
    """`kvcache publish LOG --sink 'file:e.jsonl?format=trtllm'`."""

    def test_with_a_finished_log(self, tmp_path: Path) -> None:
        """It tells the state at the end of the log."""
        with KVCacheManager(config((6, strategies.LIMIT)), log=tmp_path / "log", copier=NoBytes()) as manager:
            work(manager, 1)
            held = held_by(manager)
        path = tmp_path / "e.jsonl"
        Publisher(tmp_path / "log", [f"file:{path}?format=trtllm"], until="closed").run()
        index, odd = read(path.read_bytes().splitlines())
        assert held_in(index) == held
        assert (odd, index.orphans) == ([], 0)

    def test_over_restarts_of_both(self, tmp_path: Path) -> None:
        """A later sidecar goes on in the file with numbers from 0: another life, in which all is told again."""
        path, log = tmp_path / "e.jsonl", tmp_path / "log"
        for seed in range(3):
            manager = KVCacheManager(config(None), log=LogWriter(log, resume=True), copier=NoBytes())
            work(manager, seed)
            held = held_by(manager)
            manager.close()
            Publisher(log, [f"file:{path}?format=trtllm&append=1"], until="closed").run()
            index, odd = read(path.read_bytes().splitlines())
            assert held_in(index) == held
            assert [type(report) for report in odd] == [Restarted] * seed

    def test_log_without_tokens(self, tmp_path: Path) -> None:
        """The dicts need them, and it says so."""
        settings = config(None, log={"record_tokens": False})
        with KVCacheManager(settings, log=tmp_path / "log", copier=NoBytes()) as manager:
            work(manager, 1, 20)
        with pytest.raises(NoTokens, match="contains no token ids"):
            Publisher(tmp_path / "log", [f"file:{tmp_path}/e?format=trtllm"], until="closed").run()


def test_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """The same lines."""
    with KVCacheManager(config(None), copier=NoBytes(), sinks=["stdout:?format=trtllm"]) as manager:
        work(manager, 6)
        polled = manager.get_latest_events()
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert printed == json.loads(json.dumps(polled))


def test_rotation_keeps_files_small(tmp_path: Path) -> None:
    """Lines are whole in each of them, and all of them together say the same."""
    path = tmp_path / "e.jsonl"
    url = f"file:{path}?format=trtllm&max_bytes=20KiB&keep=500"
    with KVCacheManager(config(None), copier=NoBytes(), sinks=[url]) as manager:
        work(manager, 7)
        held = held_by(manager)
    files = [*sorted(tmp_path.glob("e.jsonl.*"), key=lambda file: -int(file.suffix[1:])), path]
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) <= 20 << 10
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    index, odd = read(lines)
    assert held_in(index) == held
    assert odd == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:/x?format=avro", "format must be one of jsonl, msgpack, trtllm"),
        ("stdout:?format=avro", "format must be one of text, jsonl, trtllm"),
        ("file:/x?format=trtllm&tokens=0", "dicts always contain token ids"),
    ],
)
def test_unknown_formats_are_refused(url: str, reason: str) -> None:
    """With those that there are."""
    with pytest.raises(SinkURLError, match=reason):
        open_sink(url, SinkContext(32, 4))


def test_refuses_what_engines_reported() -> None:
    """A log of kind `feed` knows no cache."""
    with pytest.raises(SinkURLError, match="what engines published"):
        open_sink("stdout:?format=trtllm", SinkContext(0, 1, kind="feed"))


def test_refuses_blocks_without_names() -> None:
    """Nothing could be said of them."""
    with pytest.raises(SinkOpenError, match="require block names: set block_hash"):
        KVCacheManager(config(None, block_hash="none"), sinks=["stdout:?format=trtllm"])


class TestReading:
    """What other publishers of these dicts write."""

    def test_vectors(self) -> None:
        """Those of the format: two blocks stored, one offloaded, both removed."""
        index, odd = read(json.dumps(event).encode() for event in STREAM[:3])
        assert held_in(index) == {(0, 0): {2728178455351807326}, (0, 1): {924206229973855}}
        assert index.blocks[0, 1][924206229973855].tokens == (1, 2, 3, 4)
        index, odd = read(json.dumps(event).encode() for event in STREAM)
        assert (held_in(index), odd) == ({}, [])

    def test_hole_and_restart(self) -> None:
        """Missing numbers: anything may have gone. Numbers that go back: another life."""
        texts = [json.dumps(event).encode() for event in STREAM]
        index, odd = read([texts[1], texts[3]])
        assert [(report.first, report.last) for report in odd] == [(2, 2)]
        assert held_in(index) == {}
        # What a block was before the hole is not known behind it.
        changed = json.dumps(STREAM[2] | {"event_id": 5}).encode()
        index, odd = read([*texts[:2], changed])
        assert held_in(index) == {(0, 1): {FIRST}}
        assert index.blocks[0, 1][FIRST].tokens == ()
        index, odd = read([*texts[:2], *texts[:2]])
        assert odd == [Restarted(1, 0)]
        assert len(index.resident()) == 2

    def test_ranks_are_streams_of_their_own(self) -> None:
        """Each has its numbers; batches say whose they are."""
        follower = DictFollower()
        found = [
            report.batch.rank if isinstance(report, Received) else report
            for event in STREAM[:2]
            for rank in (0, 1)
            for report in follower.take(json.dumps(event | {"attention_dp_rank": rank}).encode())
        ]
        assert found == [0, 1, 0, 1]

    def test_newer_manager(self) -> None:
        """Hex digests, layer groups, digests in place of an item's tokens, a third level, and what is unknown."""
        name = "ab" * 32
        token = {"token_id": "cd" * 32, "token_extra_id": 0}
        block = {"block_hash": name, "tokens": [token], "cache_level": 2, "uuid": "u"}
        events = [
            {"event_id": 0, "data": {"type": "novel"}, "window_size": 128, "layer_group_id": 3},
            {
                "event_id": 1,
                "data": {"type": "stored", "parent_hash": None, "blocks": [block]},
                "window_size": 128,
                "layer_group_id": 4,
            },
        ]
        index, _ = read([b"{}", b"null", *(json.dumps(event).encode() for event in events)])
        assert {place: set(blocks) for place, blocks in index.blocks.items()} == {
            (0, 2): {bytes.fromhex(name)}
        }

    @pytest.mark.parametrize(
        "line",
        [
            b"",
            b"x",
            b"[]",
            b'{"event_id": 1}',
            b'{"event_id": 1, "data": {"type": "stored"}}',
            b'{"event_id": 1, "data": {"type": [1]}}',
            b'{"event_id": 1, "data": {"type": "removed", "block_hashes": ["secret"]}}',
        ],
    )
    def test_what_is_none_is_refused(self, line: bytes) -> None:
        """And not repeated."""
        with pytest.raises(EventDecodeError) as caught:
            DictFollower().take(line)
        assert "secret" not in str(caught.value)


def test_blocks_report_their_adapter_and_dicts_the_rank(tmp_path: Path) -> None:
    """Polled or in lines: an adapter's number stands in each of its blocks, and the engine's rank in every dict."""
    path = tmp_path / "dicts.jsonl"
    config = strategies.config(attention_dp_rank=5, event_buffer_max_size=100)
    with KVCacheManager(config, sinks=[f"file:{path}?format=trtllm"]) as manager:
        manager.add_sequence("plain", [1, 2, 3])
        manager.add_sequence("tuned", [1, 2, 3], lora_id=9)
        for name in ("plain", "tuned"):
            manager.store_context_blocks(name, 3)
        manager.flush()
        polled = manager.get_latest_events()
    for dicts in (polled, [json.loads(line) for line in path.read_text().splitlines()]):
        assert [each["attention_dp_rank"] for each in dicts] == [5] * 3
        blocks = [block for each in dicts[1:] for block in each["data"]["blocks"]]
        assert [block.get("lora_id") for block in blocks] == [None, 9]
