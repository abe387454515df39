"""`kvcache replay`: the state at any point, and what is said about logs that are not whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from events.log import LogReader, LogWriter
from events.log.frames import SYNC
from events.types import FORMAT_VERSION, CacheCreated, Checkpoint, EventBatch, Gap, StateExported
from kvcache.replay import replay
from tests.support.commands import Kvcache, segments


@pytest.fixture
def copy(log: Path, tmp_path: Path) -> Path:
    """A log that may be changed."""
    return Path(shutil.copytree(log, tmp_path / "copy"))


def rewrite(log: Path, target: Path, change: object) -> Path:
    """The log with some events replaced: `change` gets each event and returns it or another one."""
    with LogWriter(target, log_id=bytes(16)) as writer:
        for batch in LogReader(log):
            events = tuple(change(event) for event in batch.events)  # type: ignore[operator]
            writer.append(EventBatch(batch.seq, batch.ts, events))
    return target


class TestSummary:
    """What a whole log replays to."""

    def test_people(self, kvcache: Kvcache, log: Path) -> None:
        """Levels, sequences, prefixes, checkpoints, end and fingerprint are shown."""
        done = kvcache("replay", log, "--verify")
        state = replay(log).state
        cached = state.groups[0].levels[0].unreferenced
        assert done.code == 0
        assert [line.split() for line in done.out.splitlines()][2] == [
            "primary",
            "120",
            "0",
            str(cached),
            str(120 - cached),
        ]
        assert "sequences       0 running" in done.out
        assert "1 compared: all agree" in done.out
        assert "closed in good order" in done.out
        assert replay(log).fingerprint.hex() in done.out

    def test_no_checkpoints(self, kvcache: Kvcache, log: Path) -> None:
        """Where there is nothing to compare with, nothing agrees."""
        done = kvcache("replay", log, "--verify", "--at", 3)
        assert "checkpoints     none up to there; all invariants hold" in done.out

    def test_json(self, kvcache: Kvcache, log: Path) -> None:
        """The same as JSON, with blocks per level that add up."""
        found = json.loads(kvcache("replay", log, "--json").out)
        replayed = replay(log)
        assert found["fingerprint"] == replayed.fingerprint.hex()
        assert (found["seq"], found["events"], found["epoch"]) == (replayed.last_seq, replayed.events, 0)
        assert (found["gaps"], found["end"]["kind"], found["verified"]) == ([], "clean", False)
        [group] = found["groups"]
        for level, blocks in (("primary", 120), ("secondary", 100)):
            numbers = group[level]
            assert numbers["blocks"] == blocks == numbers["held"] + numbers["unreferenced"] + numbers["blank"]
        assert 0 < group["prefixes"] <= group["runs"]
        assert group["namespaces"] == 1

    @pytest.mark.parametrize("at", [0, 7, 40])
    def test_any_point(self, kvcache: Kvcache, log: Path, at: int) -> None:
        """--at gives the state after that batch, in which requests are running."""
        found = json.loads(kvcache("replay", log, "--at", at, "--json").out)
        replayed = replay(log, at)
        assert (found["seq"], found["fingerprint"]) == (at, replayed.fingerprint.hex())
        assert found["num_sequences"] == len(replayed.state.sequences)
        assert found["end"] is None

    def test_beyond_the_end(self, kvcache: Kvcache, log: Path) -> None:
        """A batch that the log does not reach is a wrong request."""
        last = replay(log).last_seq
        done = kvcache("replay", log, "--at", last + 1)
        assert (done.code, done.out) == (2, "")
        assert f"batch {last + 1} is after the end of the log, whose last batch is {last}" in done.err


class TestTrouble:
    """Logs that are not whole."""

    @pytest.mark.parametrize("kind", ["torn", "open"])
    def test_all_commands_report_how_a_log_ends(
        self, kvcache: Kvcache, copy: Path, kind: str, tmp_path: Path
    ) -> None:
        """On stderr, and in JSON as `replay` has it; of a log that was closed nothing is said."""
        commands = {
            "audit": (),
            "curve": (),
            "whatif": ("--no-bound", "--jobs", 1),
            "explain": ("--request", 0),
        }
        for name, options in commands.items():
            assert kvcache(name, copy, *options).err == ""
        file = segments(copy)[-1]
        whole = file.read_bytes()
        closed = list(re.finditer(re.escape(SYNC), whole))[-1].start()
        file.write_bytes(whole[: closed + 9 if kind == "torn" else closed])
        for name, options in commands.items():
            done = kvcache(name, copy, *options, "--json")
            assert f"the log is {kind}: " in done.err
            end = json.loads(done.out)["end"]
            assert end == json.loads(kvcache("replay", copy, "--json").out)["end"]
            assert end["kind"] == kind
        for args in (("events", copy), ("export", copy, "--to", "csv", "-o", tmp_path / "t")):
            assert f"the log is {kind}: " in kvcache(*args).err
        assert f"{copy} is {kind}: " in kvcache("diff", copy, copy).err

    def test_torn_tail(self, kvcache: Kvcache, copy: Path) -> None:
        """A tail that was cut off while it was written is reported and is no error; what is before it counts."""
        last = replay(copy).last_seq
        file = segments(copy)[-1]
        with file.open("r+b") as segment:
            segment.truncate(file.stat().st_size - 130)
        done = kvcache("replay", copy, "--verify")
        assert (done.code, done.err) == (0, "")
        assert f"torn: the writer stopped inside a batch ({file}, byte" in done.out
        found = json.loads(kvcache("replay", copy, "--json").out)
        assert found["end"]["kind"] == "torn"
        assert 0 < found["seq"] < last
        events = kvcache("events", copy)
        assert (events.code, events.err.count("\n")) == (0, 1)
        assert "the log is torn: the writer stopped inside a batch" in events.err

    def test_damage(self, kvcache: Kvcache, copy: Path) -> None:
        """A flipped bit in the middle is damage: file and offset are named, and nothing behind it is shown."""
        [file] = segments(copy)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        done = kvcache("replay", copy)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"kvcache: error: {file} is damaged at byte ")
        events = kvcache("events", copy)
        assert events.code == 1
        assert f"{file} is damaged at byte " in events.err
        assert 0 < events.out.count("\n") < kvcache("events", copy.parent / "copy").out.count("\n") + 1

    def test_newer_log(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """A log of a newer version is a wrong request for this version."""

        def newer(event: object) -> object:
            if isinstance(event, CacheCreated):
                return msgspec.structs.replace(event, format_version=FORMAT_VERSION + 1)
            return event

        changed = rewrite(log, tmp_path / "newer", newer)
        for command in (["replay"], ["events"], ["match", "--request", "1"]):
            done = kvcache(command[0], changed, *command[1:])
            assert done.code == 2
            assert f"has format version {FORMAT_VERSION + 1}, which is newer than this software" in done.err

    def test_false_checkpoint(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """With --verify, a checkpoint that disagrees is counted and makes the command fail; without, nobody looks."""

        def falsify(event: object) -> object:
            return (
                msgspec.structs.replace(event, fingerprint=bytes(32))
                if isinstance(event, Checkpoint)
                else event
            )

        changed = rewrite(log, tmp_path / "false", falsify)
        last = replay(log).last_seq
        done = kvcache("replay", changed, "--verify")
        assert done.code == 1
        assert "0 agree, 1 disagree" in done.out
        assert f"1 checkpoint disagree with the replay, in batch {last}" in done.err
        assert json.loads(kvcache("replay", changed, "--verify", "--json").out)["checkpoints_failed"] == [
            last
        ]
        assert kvcache("replay", changed).code == 0

    def test_events_that_do_not_fit(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """Batches that do not follow from each other are wrong data, not a traceback."""
        with LogWriter(tmp_path / "odd") as writer:
            for seq, batch in enumerate(batch for batch in LogReader(log) if batch.seq != 1):
                writer.append(EventBatch(seq, batch.ts, batch.events))
        done = kvcache("replay", tmp_path / "odd")
        assert done.code == 1
        assert "does not fit the batches before it" in done.err
        assert "Traceback" not in done.err

    def test_gap(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """Lost batches are reported; the state after them is what was exported then."""
        at = replay(log).last_seq - 1
        exported = replay(log, at).state.export()
        with LogWriter(tmp_path / "gap") as writer:
            first = next(iter(LogReader(log)))
            writer.append(first)
            writer.append(EventBatch(1, 0, (Gap(1, at, "lost"), exported)))
        assert isinstance(exported, StateExported)
        done = kvcache("replay", tmp_path / "gap")
        assert done.code == 0
        assert f"batches 1 to {at} are missing: lost" in done.out
        found = json.loads(kvcache("replay", tmp_path / "gap", "--json").out)
        assert found["gaps"] == [{"first_seq": 1, "last_seq": at, "reason": "lost"}]
        assert found["fingerprint"] == replay(log, at).fingerprint.hex()

    def test_empty_log(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """A log whose writer never wrote has an empty state."""
        LogWriter(tmp_path / "empty").close()
        found = json.loads(kvcache("replay", tmp_path / "empty", "--json").out)
        assert (found["seq"], found["groups"]) == (-1, [])
        done = kvcache("match", tmp_path / "empty", "--request", "1")
        assert done.code == 2
        assert "has no cache" in done.err
