"""`kvcache top`: what it shows is what `audit` and `replay` say, and what the tests themselves have made happen."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from events.errors import LogDamaged
from events.log import LogReader, LogWriter
from events.log.segments import first_seq, segment_paths
from events.types import BlocksMoved, BlocksRemoved, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager, Recorder
from kvcache.audit.reasons import Reason
from kvcache.cli import top as top_module
from kvcache.cli.output import Output
from kvcache.cli.top import Followed, show, to_json
from kvcache.errors import OutOfBlocks
from kvcache.maintenance.prune import make_snapshot
from kvcache.manager import Substitutes
from kvcache.publish.errors import LogReplaced
from tests.support.answers import answer, assert_documented
from tests.support.commands import Kvcache, Start, run_log
from tests.support.forked import Forked
from tests.support.logs.random_logs import random_log
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, Clock

SECOND = 10**9
LONG = 10**6 * SECOND
START = 1_790_000_000 * SECOND
COUNTS = ("requests", "refusals", "prompt_tokens", "reused_tokens", "reasons")


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is looked at often."""
    monkeypatch.setattr(top_module, "_POLL_SECONDS", 0.001)


def looked_at(log: Path, window: int) -> dict[str, Any]:
    """What is known of a log once it is read."""
    top = Followed(log, window)
    top.read(lambda: None, follow=False)
    out = Output()
    assert out.frame(lambda: show(top, out))
    return to_json(top)


def audited(kvcache: Kvcache, log: Path, *options: Any) -> dict[str, Any]:
    audit: dict[str, Any] = json.loads(kvcache("audit", log, "--json", *options).out)
    levels = {name: level["evicted"] for name, level in audit["levels"].items()}
    return {name: audit[name] for name in COUNTS} | {"evicted": levels}


def counted(recent: dict[str, Any]) -> dict[str, Any]:
    return {name: recent[name] for name in (*COUNTS, "evicted")}


class TestCounts:
    """Against the audit, and against the events."""

    @pytest.mark.parametrize("seconds", [1, 5, 10, 100])
    def test_a_window_is_what_the_audit_counts_from_its_first_batch_on(
        self, kvcache: Kvcache, log: Path, seconds: int
    ) -> None:
        """The same requests, tokens by reason, and evictions; the window is as long as was asked for."""
        batches = list(LogReader(log))
        recent = looked_at(log, seconds * SECOND)["recent"]
        first, since = recent["first_seq"], batches[-1].ts - seconds * SECOND
        assert counted(recent) == audited(kvcache, log, "--since", first)
        # Batches closer together than a 3600th of it are counted together.
        assert batches[first].ts >= since
        assert all(batch.ts < since + seconds * SECOND // 3600 for batch in batches[:first])
        assert recent["seconds"] == min(seconds, (batches[-1].ts - batches[0].ts) / SECOND)
        events = [event for batch in batches[first:] for event in batch.events]
        added = [event for event in events if isinstance(event, SequenceAdded)]
        assert recent["requests"] == len(added)
        assert recent["prompt_tokens"] == sum(event.num_tokens for event in added)
        assert recent["reused_tokens"] == sum(event.reused for event in added)
        assert recent["batches"] == len(batches) - first

    @pytest.mark.parametrize("seed", seeds(range(20), quick=2))
    def test_random_logs(self, kvcache: Kvcache, tmp_path: Path, seed: int) -> None:
        """Whatever happened, it is what the audit and the replay say; windows of a tenth of the log, and all."""
        log = random_log(seed, tmp_path)
        batches = list(LogReader(log))
        shown: dict[str, Any] = {}
        for window in (max((batches[-1].ts - batches[0].ts) // 10, 1), LONG):
            shown = looked_at(log, window)
            audit = audited(kvcache, log, "--since", shown["recent"]["first_seq"])
            assert without_losses(counted(shown["recent"])) == without_losses(audit)
            if shown["known_since_seq"] is None:
                assert counted(shown["recent"]) == audit
        assert shown["known_since_seq"] is None
        replayed = json.loads(kvcache("replay", log, "--json").out)
        assert shown["running"] == replayed["num_sequences"]
        assert shown["groups"] == [
            {name: group[name] for name in ("window", "primary", "secondary")} for group in replayed["groups"]
        ]

    def test_evictions_are_blocks_that_left_a_level(self, log: Path) -> None:
        """Of primary also those that moved to secondary; blocks of a prompt's end may be partial, and do not count."""
        events = [event for batch in LogReader(log) for event in batch.events]
        gone = [0, 0]
        for event in events:
            if isinstance(event, BlocksRemoved):
                gone[event.level] += len(event.slots) // 4
            elif isinstance(event, BlocksMoved) and event.why == "offload":
                gone[0] += len(event.from_slots) // 4
        evicted = looked_at(log, LONG)["recent"]["evicted"]
        assert 0 < evicted["primary"] <= gone[0]
        assert 0 < evicted["secondary"] <= gone[1]


class Engine:
    """A manager with a clock of its own, which writes a log."""

    def __init__(self, log: Path, clock: Clock, *, resume: bool = False) -> None:
        config = KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=8)
        self.manager = KVCacheManager(
            config,
            log=LogWriter(log, resume=resume, fsync="never"),
            substitutes=Substitutes(wall_ns=lambda: START + int(clock.now * SECOND)),
        )

    def refused(self, name: str, tokens: int) -> None:
        with pytest.raises(OutOfBlocks):
            self.manager.add_sequence(name, [ord(name), *range(1, tokens)])

    def add(self, name: str, tokens: int) -> None:
        self.manager.add_sequence(name, [ord(name), *range(1, tokens)])
        self.manager.store_context_blocks(name, tokens)

    def step(self) -> None:
        """End the step, and have it in the file."""
        self.manager.flush()
        self.manager.wait_durable()


Step = Callable[[], object]


def follow(top: Followed, steps: Iterator[object]) -> None:
    """Follow a log; whenever all of it is read, the next of the steps is taken, which may look and write."""
    done: list[bool] = []

    def look() -> None:
        if not done and next(steps, None) is None:
            done.append(True)

    top.read(look, lambda: bool(done))


class TestFollowing:
    """While the log is being written."""

    def test_what_happens_is_seen(self, tmp_path: Path) -> None:
        """Requests that run, wait, are preempted, evict and end, and what of it is long past; then a restart."""
        clock, mine = Clock(0.0), Clock(0.0)
        engine = Engine(tmp_path / "log", clock)
        engine.step()
        top = Followed(
            tmp_path / "log", 60 * SECOND, wall_ns=lambda: START + int((mine.now + 1000) * SECOND), clock=mine
        )

        seen: list[dict[str, Any]] = []

        def shown(**facts: object) -> bool:
            """Whether it is so; then the next step may be taken."""
            said = to_json(top)
            said |= said["recent"]
            seen.append({name: said[name] for name in facts})
            return seen[-1] == facts

        def steps() -> Iterator[object]:
            engine.add("a", 21)
            engine.refused("b", 20)
            engine.refused("b", 20)  # is recorded once
            engine.step()
            yield from until(
                lambda: shown(running=1, waiting=1, requests=1, refusals=1, preempted=0, prompt_tokens=21)
            )
            engine.manager.remove_sequence("a", why="preempted")
            engine.step()
            yield from until(lambda: shown(running=0, waiting=2, preempted=1))
            clock.now = mine.now = 30.0
            yield True  # the end is reached once more: what comes now has not waited to be read
            engine.add("b", 20)
            engine.step()
            yield from until(
                lambda: shown(running=1, waiting=1, requests=2, evicted={"primary": 2, "secondary": 0})
            )
            assert top.recent_totals(10 * SECOND).admitted == 1
            mine.now = 75.0
            yield from until(lambda: shown(waiting=0, requests=1, refusals=0, preempted=0, seconds=60.0))
            assert top.age == 45.0
            mine.now = 100.0
            yield from until(lambda: shown(running=1, requests=0, hit_rate=None, prompt_tokens=0))
            clock.now = mine.now
            yield True
            engine.refused("c", 30)
            engine.manager.close()
            yield from until(lambda: shown(closed=True, waiting=1))
            mine.now = 120.0
            yield from until(lambda: shown(closed=True, waiting=1, last_batch_age_seconds=20.0))
            clock.now = mine.now
            yield True
            again = Engine(tmp_path / "log", clock, resume=True)
            again.step()
            yield from until(lambda: shown(closed=False, epoch=1, running=0, waiting=0))
            again.manager.close()

        follow(top, steps())

    @pytest.mark.parametrize("how", ["removed", "emptied", "replaced"])
    def test_a_log_that_is_gone(self, tmp_path: Path, how: str) -> None:
        """That the directory is gone, empty, or holds another log now is said, and ends it."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 5)
        other = run_log(tmp_path / "other", "--primary-blocks", 100, "--limit", 5, "--seed", 2)

        def steps() -> Iterator[object]:
            for path in segment_paths(log):
                path.unlink()
            if how == "removed":
                shutil.rmtree(log)
            elif how == "replaced":
                shutil.rmtree(log)
                other.rename(log)
            yield from until(lambda: False)

        with pytest.raises(LogReplaced, match="was removed or replaced by another log"):
            follow(Followed(log, LONG), steps())

    def test_damage(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """Is one line, and exit code 1."""
        copy = tmp_path / "log"
        shutil.copytree(log, copy)
        path = segment_paths(copy)[0]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        done = kvcache("top", copy)
        assert (done.code, done.out) == (1, "")
        assert "is damaged at byte" in done.err
        with pytest.raises(LogDamaged):
            Followed(copy, LONG).read(lambda: None, lambda: False)


def until(condition: Callable[[], bool]) -> Iterator[object]:
    """Look again until it is so."""
    deadline = monotonic() + WAIT
    while not condition():
        assert monotonic() < deadline, "it does not come"
        yield True


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments and two epochs."""
    directory = tmp_path_factory.mktemp("long") / "log"
    settings = ("--set", "log.segment_bytes=65536", "--set", "log.compression=none", "--concurrency", 3)
    run_log(directory, "--primary-blocks", 120, "--secondary-blocks", 60, *settings)
    return run_log(directory, "--primary-blocks", 120, "--secondary-blocks", 60, *settings, "--continue")


def beginnings(log: Path) -> list[int]:
    """Make a snapshot after each segment but the last; returns where their segments begin."""
    firsts = [first_seq(path) for path in segment_paths(log)[1:]]
    assert all(make_snapshot(log, first) for first in firsts)
    return firsts


AS_GOOD_AS_NEW = (Reason.SAME_STEP, Reason.BEING_COMPUTED, Reason.OTHER_NAMESPACE, Reason.NEVER_SEEN)
"""Reasons of blocks that are not known to have been cached."""


def without_losses(recent: dict[str, Any]) -> dict[str, Any]:
    """Counts in which nobody knows any more what was evicted or lost."""
    reasons = dict(recent["reasons"])
    new = sum(reasons.pop(each.label) for each in Reason if each.is_lost or each in AS_GOOD_AS_NEW)
    return recent | {"reasons": reasons | {"new": new}}


class TestBeginning:
    """Reading begins no earlier than it must."""

    def test_a_snapshot_before_the_window_is_as_good_as_the_beginning(
        self, long_log: Path, tmp_path: Path
    ) -> None:
        """All numbers are the same, but for what was evicted before: from there on nobody has seen it."""
        log = tmp_path / "log"
        shutil.copytree(long_log, log)
        batches = list(LogReader(log))
        window = (batches[-1].ts - batches[0].ts) // 8
        whole = looked_at(log, window)
        # The second epoch's clock begins again.
        begin = next(batch.seq for batch in batches[1:] if type(batch.events[0]).__name__ == "EpochStarted")
        assert whole["known_since_seq"] in (None, begin)
        snapshots = beginnings(log)
        part = looked_at(log, window)
        assert part["known_since_seq"] + 1 in snapshots
        assert begin < part["known_since_seq"] < whole["recent"]["first_seq"]
        for said in (whole, part):
            said.pop("known_since_seq"), said.pop("last_batch_age_seconds")
        assert whole["recent"]["requests"] > 0
        assert without_losses(part.pop("recent")) == without_losses(whole.pop("recent"))
        assert without_losses(part.pop("now")) == without_losses(whole.pop("now"))
        assert part == whole

    def test_reasons_are_the_same_where_nothing_older_is_asked_for(
        self, kvcache: Kvcache, long_log: Path, tmp_path: Path
    ) -> None:
        """What was evicted after the snapshot is known to have been."""
        log = tmp_path / "log"
        shutil.copytree(long_log, log)
        beginnings(log)
        last = list(LogReader(log))[-1]
        shown = {window: looked_at(log, window * SECOND) for window in (2, 20)}
        assert shown[2]["known_since_seq"] > (shown[20]["known_since_seq"] or 0)
        for each in shown.values():
            recent = each["recent"]
            mine = {reason: recent["reasons"][reason] for reason in ("primary", "secondary", "partial")}
            audit = audited(kvcache, log, "--since", recent["first_seq"])["reasons"]
            assert {reason: audit[reason] for reason in mine} == mine
            assert recent["reasons"]["dropped"] <= audit["dropped"]
        assert last.seq == shown[2]["seq"]

    def test_what_is_not_known_is_said(self, kvcache: Kvcache, long_log: Path, tmp_path: Path) -> None:
        """Since when; and of a log that is read whole nothing."""
        log = tmp_path / "log"
        shutil.copytree(long_log, log)
        beginnings(log)
        seq = looked_at(log, 2 * SECOND)["known_since_seq"]
        assert f"known from batch {seq:,} (2026-01-01T" in kvcache("top", log, "--window", "2s").out
        assert "known from" not in kvcache("top", log, "--window", "10d").out

    def test_what_is_forgotten_does_not_move_the_window(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a log whose second epoch's clock begins again the same batches are in it."""
        options = ("--primary-blocks", 60, "--secondary-blocks", 0, "--concurrency", 2)
        log = run_log(tmp_path / "log", *options)
        run_log(log, *options, "--continue")
        whole = looked_at(log, 20 * SECOND)
        monkeypatch.setattr(top_module, "_CONTENTS_MAX", 10)
        # With the epoch, where that is before the window, nothing would have to be forgotten.
        monkeypatch.setattr(Followed, "_beginning", lambda self: None)
        part = looked_at(log, 20 * SECOND)
        assert part["known_since_seq"] is not None
        assert without_losses(part["recent"]) == without_losses(whole["recent"])

    def test_memory_does_not_grow_with_the_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was evicted long ago is forgotten again and again, which is said; nothing else changes."""
        log = run_log(tmp_path / "log", "--primary-blocks", 100, "--secondary-blocks", 0)
        looked_from_start = Followed(log, LONG)
        looked_from_start.read(lambda: None, follow=False)
        whole = to_json(looked_from_start)
        monkeypatch.setattr(top_module, "_CONTENTS_MAX", 10)
        top = Followed(log, LONG)
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, len(top.history.contents))

        top.read(look, follow=False)
        part = to_json(top)
        assert most < 2 * 100 + 100 < len(looked_from_start.history.contents)
        assert 0 < part["known_since_seq"] < part["seq"]
        assert without_losses(part["recent"]) == without_losses(whole["recent"])
        assert part["recent"]["reasons"] != whole["recent"]["reasons"]
        assert (part["groups"], part["running"]) == (whole["groups"], whole["running"])


class TestShown:
    """What people and programs are shown."""

    def test_plain(self, kvcache: Kvcache, log: Path) -> None:
        """Where stdout is no terminal there is one frame, with the numbers of the JSON."""
        done = kvcache("top", log, "--window", "10m")
        said = answer(kvcache("top", log, "--window", "10m", "--once", "--json"))
        assert (done.code, done.err) == (0, "")
        rate = f"{said['recent']['hit_rate']:.1%}".replace("%", " %")
        [line] = [line for line in done.out.splitlines() if line.startswith("  token hit rate")]
        assert line.endswith(f"  {rate}")
        primary = said["groups"][0]["primary"]
        [line] = [line for line in done.out.splitlines() if line.startswith("  primary")]
        numbers = [str(primary[name]) for name in ("blocks", "held", "unreferenced", "blank")]
        assert line.split()[1:5] == numbers
        tokens = f"{said['recent']['reasons']['primary']:,}"
        assert re.search(rf"(?m)^  reused from primary +{tokens} ", done.out)
        assert "epoch 0, decided by kvcache" in done.out
        assert "the log was closed by its writer" in done.out

    def test_who_decides(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Is named, where it is an engine that has been recorded; nothing in its name drives the terminal."""
        config = KVCacheConfig(tokens_per_block=4, primary_blocks=8, max_sequence_length=32)
        with Recorder(config, engine="mine \x1b[2J 1.0", log=tmp_path / "log") as recorder:
            recorder.admitted("a", list(range(10)))
            recorder.flush()
        assert "decided by mine \\x1b[2J 1.0\n" in kvcache("top", tmp_path / "log").out
        assert answer(kvcache("top", tmp_path / "log", "--json", "--once"))["engine"] == "mine \x1b[2J 1.0"

    def test_missing_batches(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Are said, with their numbers."""
        log = random_log(4, tmp_path)
        gap = json.loads(kvcache("replay", log, "--json").out)["gaps"][-1]
        assert gap["first_seq"] == gap["last_seq"]
        assert f"batch {gap['first_seq']:,} is missing and not counted" in kvcache("top", log).out

    @pytest.mark.parametrize("command", ["top", "replay"])
    def test_no_second_level(self, kvcache: Kvcache, tmp_path: Path, command: str) -> None:
        """Of a level that is not there people read nothing."""
        options = ("--primary-blocks", 100, "--limit", 4, "--secondary-blocks")
        alone, both = (run_log(tmp_path / f"{blocks}", *options, blocks) for blocks in (0, 40))
        assert "secondary" not in kvcache(command, alone).out
        assert kvcache(command, both).out.count("secondary") == 2

    def test_every_key_is_documented(self, kvcache: Kvcache, log: Path) -> None:
        """In the command's table, and no other ones."""
        assert_documented("top", answer(kvcache("top", log, "--json", "--once")))

    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_it_fits(self, log: Path, width: int) -> None:
        """Into the width of a terminal; all prompt tokens have a reason, those of most tokens first."""
        top = Followed(log, LONG)
        top.read(lambda: None, follow=False)
        console, out = Console(file=(text := StringIO()), width=width), Output()
        console.print(*out.frame(lambda: show(top, out)), sep="\n")
        assert max(map(len, text.getvalue().splitlines())) <= width
        out = Mock()
        show(top, out)
        [rows] = out.table.call_args_list[-1].args
        assert list(rows[0])[1:] == ["count", "share"]
        counts = [row["count"] for row in rows]
        assert sum(counts) == top.recent_totals(LONG).prompt_tokens
        assert counts == sorted(counts, reverse=True)

    def test_on_a_terminal(self, log: Path) -> None:
        """It is drawn again and again until Ctrl-C."""
        master, slave = pty.openpty()
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
        process = Forked(
            "kvcache", "top", str(log), "--interval", "10ms", stdout=slave, stderr=slave, env=settings
        )
        os.close(slave)
        shown = b""
        while shown.count(b"token hit rate") < 3:
            shown += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the other end is closed
            while os.read(master, 65536):
                pass
        os.close(master)
        assert process.wait(WAIT) == 128 + signal.SIGINT

    def test_json_goes_on(self, start: Start, log: Path) -> None:
        """In a pipe, too, an object a line until a signal comes."""
        process = start("top", log, "--json", "--interval", "10ms")
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT)
        assert process.returncode == 128 + signal.SIGTERM
        assert {each["seq"] for each in said} <= {said[-1]["seq"], *range(said[-1]["seq"])}

    def test_a_log_without_batches(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Is said to have none."""
        LogWriter(tmp_path / "log").close()
        done = kvcache("top", tmp_path / "log")
        assert (done.code, "no batch has been written yet" in done.out) == (0, True)

    def test_a_log_without_tokens(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Why prompt tokens were computed is not known then, which is said."""
        log = run_log(tmp_path / "log", "--limit", 5, "--set", "log.record_tokens=false")
        assert "the log does not record tokens, so the reasons" in kvcache("top", log).out

    @pytest.mark.parametrize("given", ["0", "5x", "-1s", ""])
    def test_lengths_of_time(self, kvcache: Kvcache, log: Path, given: str) -> None:
        """What is none is refused."""
        done = kvcache("top", log, f"--window={given}")
        assert (done.code, "is not a duration" in done.err) == (2, True)

    def test_no_log(self, kvcache: Kvcache, tmp_path: Path, log: Path) -> None:
        """The message for a directory of logs names some, unlike that for one without."""
        assert kvcache("top", tmp_path).code == 2
        assert "is a directory of logs" in kvcache("top", log.parent).err
