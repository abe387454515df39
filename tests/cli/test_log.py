"""`kvcache log`: what there is, whether it is whole, and keeping less; and other commands about such logs."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader, LogWriter
from events.log.leases import Lease
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths, snapshots
from kvcache.maintenance.prune import make_snapshot
from kvcache.replay import replay
from tests.support.answers import SIZES, answer, keys_of
from tests.support.commands import Kvcache, run_log
from tests.support.logs.damaging import unreadable
from tests.support.places import ROOT


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments. Not to be changed."""
    directory = tmp_path_factory.mktemp("logs") / "log"
    return run_log(directory, *SIZES, "--set", "log.segment_bytes=16000", "--set", "log.compression=none")


@pytest.fixture
def kept(whole: Path, tmp_path: Path, kvcache: Kvcache) -> Path:
    """The same log, of which eight segments are kept."""
    log = Path(shutil.copytree(whole, tmp_path / "kept"))
    assert kvcache("log", "prune", log, "--retain-segments", 8, "-q").code == 0
    return log


def bytes_in(log: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.iterdir() if path.is_file()}


def test_info(kvcache: Kvcache, kept: Path) -> None:
    """Segments and snapshots with their sizes, the log's identity, and who needs it; nothing is changed."""
    before = bytes_in(kept)
    found = answer(kvcache("log", "info", kept, "--json"))
    assert [each["first_seq"] for each in found["segments"]] == list(map(first_seq, segment_paths(kept)))
    assert [each["seq"] for each in found["snapshots"]] == list(map(first_seq, snapshot_paths(kept)))
    sizes = [path.stat().st_size for path in [*segment_paths(kept), *snapshot_paths(kept)]]
    assert found["bytes"] == sum(sizes)
    assert (found["epoch"], found["closed"], found["needed_from"]) == (0, True, None)
    lease = Lease(kept)
    lease.hold(300)
    assert answer(kvcache("log", "info", kept, "--json"))["needed_from"] == 300
    done = kvcache("log", "info", kept)
    assert "need batches from 300 on" in done.out
    assert re.search(r"end +closed\n", done.out)
    assert len([line for line in done.out.splitlines() if line.startswith(("  segment", "  snapshot"))]) == 10
    lease.end()
    assert bytes_in(kept) == before


def test_verify(kvcache: Kvcache, kept: Path) -> None:
    """All that is kept is read, and each snapshot compared; that the beginning is gone is said on stderr."""
    found = kvcache("log", "verify", kept, "--json", "-q")
    reported = json.loads(found.out)
    assert (reported["snapshots_verified"], reported["problems"], reported["unused_snapshots"]) == (2, [], [])
    assert reported["end"]["begins"] == first_seq(snapshot_paths(kept)[0])
    assert reported["batches"] == len(list(LogReader(kept)))
    done = kvcache("log", "verify", kept)
    assert "begins with a snapshot after batch" in done.err
    assert "2 agree with the log" in done.out


def test_what_the_disk_does_not_give_back_is_named(kvcache: Kvcache, whole: Path, tmp_path: Path) -> None:
    """`verify` fails and `salvage` says what is lost, with the file and the system's reason; readers name it, too."""
    place = segment_paths(whole)[1]
    with unreadable(place):
        verified = kvcache("log", "verify", whole)
        salvaged = kvcache("log", "salvage", whole, "--to", tmp_path / "new", "--json")
        replayed = kvcache("replay", whole)
    for said in (verified.err, salvaged.out, replayed.err):
        assert place.name in said
        assert "Input/output error" in said
    assert (verified.code, replayed.code) == (1, 2)
    assert kvcache("log", "verify", tmp_path / "new").code == 0


def test_verify_reports_snapshots_that_are_no_good(kvcache: Kvcache, kept: Path, whole: Path) -> None:
    """A damaged one and one with another state are wrong; one that nothing continues is passed over."""
    made = make_snapshot(whole, first_seq(segment_paths(whole)[5]))
    assert made is not None
    unused = kept / made.path.name
    shutil.move(made.path, unused)
    newest = snapshot_paths(kept)[-1]
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = kvcache("log", "verify", kept, "--json")
    assert done.code == 1
    reported = json.loads(done.out)
    assert reported["unused_snapshots"] == [unused.name]
    assert [str(newest) in problem for problem in reported["problems"]] == [True]


def test_prune(kvcache: Kvcache, whole: Path, tmp_path: Path) -> None:
    """By number, bytes and time; the answer says what went, and what is left replays to the same end."""
    for options in (("--retain-segments", 4), ("--retain-bytes", "120KiB"), ("--retain-seconds", 2)):
        log = Path(shutil.copytree(whole, tmp_path / str(options[1])))
        reported = answer(kvcache("log", "prune", log, *options, "--json", "-q"))
        assert reported["removed"]["segments"] == len(segment_paths(whole)) - len(segment_paths(log)) > 0
        assert len(reported["kept"]["segments"]) == len(segment_paths(log))
        assert replay(log).fingerprint == replay(whole).fingerprint
        done = kvcache("log", "prune", log, *options)
        assert "removed   0 segments, 0 snapshots, 0 B" in done.out


@pytest.mark.parametrize("args", [("prune", "--retain-segments", 1), ("compact",)])
def test_compact(kvcache: Kvcache, whole: Path, tmp_path: Path, args: tuple[Any, ...]) -> None:
    """Keeping one segment leaves a snapshot and what follows."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    reported = answer(kvcache("log", args[0], log, *args[1:], "--json", "-q"))
    assert reported["removed"]["segments"] == len(segment_paths(whole)) - 1
    assert (len(segment_paths(log)), len(snapshot_paths(log))) == (1, 1)
    assert replay(log).fingerprint == replay(whole).fingerprint


@pytest.fixture
def torn(whole: Path, tmp_path: Path) -> Path:
    """The log with half a batch at its end."""
    log = Path(shutil.copytree(whole, tmp_path / "torn"))
    last = segment_paths(log)[-1]
    last.write_bytes(last.read_bytes()[:-50])
    return log


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """The log with a changed byte in its middle, and no mark at its end."""
    log = Path(shutil.copytree(whole, tmp_path / "damaged"))
    paths = segment_paths(log)
    data = paths[4].read_bytes()
    paths[4].write_bytes(data[:700] + b"\0\1" + data[702:])
    paths[-1].write_bytes(paths[-1].read_bytes()[:-36])
    return log


READERS: list[tuple[Any, ...]] = [
    ("log", "verify", "LOG"),
    ("replay", "LOG", "--verify"),
    ("audit", "LOG"),
    ("events", "LOG"),
]


@pytest.mark.parametrize("args", READERS)
def test_a_torn_tail_is_said_and_damage_is_a_failure(
    kvcache: Kvcache, torn: Path, damaged: Path, args: tuple[Any, ...]
) -> None:
    """What reads stops at a torn tail, says so and exits with 0; at damage with 1. No byte is changed."""
    for log, code, says in (
        (torn, 0, "torn: the writer stopped inside a batch"),
        (damaged, 1, "is damaged at byte 6"),
    ):
        before = bytes_in(log)
        done = kvcache(*(log if each == "LOG" else each for each in args))
        assert (done.code, says in done.out + done.err) == (code, True)
        assert bytes_in(log) == before


def test_repair(kvcache: Kvcache, torn: Path) -> None:
    """It says what it would do, does it, and then there is nothing left to do; the bytes are in the quarantine."""
    before, last = bytes_in(torn), segment_paths(torn)[-1]
    would = answer(kvcache("log", "repair", torn, "--dry-run", "--json"))
    assert bytes_in(torn) == before
    assert (
        "would be moved to quarantine/: an incomplete batch"
        in kvcache("log", "repair", torn, "--dry-run").out
    )
    reported = answer(kvcache("log", "repair", torn, "--json"))
    assert reported == would | {"dry_run": False}
    [aside] = (torn / "quarantine").iterdir()
    assert last.read_bytes() + aside.read_bytes() == before[last.name]
    assert (reported["cut"]["offset"], reported["cut"]["bytes"]) == (
        last.stat().st_size,
        aside.stat().st_size,
    )
    assert "nothing to repair" in kvcache("log", "repair", torn).out
    assert answer(kvcache("log", "verify", torn, "--json", "-q"))["end"]["kind"] == "open"


def test_repair_refuses_damage_and_a_log_that_is_written(
    kvcache: Kvcache, whole: Path, tmp_path: Path
) -> None:
    """No byte is changed; damage exits with 1, a writer at work with 2."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    last = segment_paths(log)[-1]
    data = last.read_bytes()[:-36]
    last.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    before = {path.name: path.read_bytes() for path in segment_paths(log)}
    for args in ((), ("--dry-run",)):
        done = kvcache("log", "repair", log, *args)
        assert (done.code, "is damaged at byte" in done.err) == (1, True)
    last.write_bytes(data)
    with LogWriter(log, resume=True):
        done = kvcache("log", "repair", log)
        assert (done.code, "is being written by" in done.err) == (2, True)
    assert {path.name: len(path.read_bytes()) for path in segment_paths(log)} == {
        name: len(data) for name, data in before.items()
    }
    assert not (log / "quarantine").exists()


def test_salvage(kvcache: Kvcache, damaged: Path, kept: Path, tmp_path: Path) -> None:
    """What can be read is in a new log that verifies; what is lost is said; the old one stays as it is."""
    make_snapshot(kept)
    for path in snapshot_paths(kept):
        shutil.copy(path, damaged)
    before = bytes_in(damaged)
    reported = answer(kvcache("log", "salvage", damaged, "--to", tmp_path / "new", "--json", "-q"))
    assert bytes_in(damaged) == before
    [lost], [place] = reported["lost"], reported["damage"]
    assert (Path(place["path"]), place["seq"]) == (segment_paths(damaged)[4], lost["first_seq"])
    assert lost["last_seq"] == first_seq(snapshot_paths(kept)[0])
    done = kvcache("log", "salvage", damaged, "--to", tmp_path / "another")
    assert f"lost    batches {lost['first_seq']:,} to {lost['last_seq']:,}" in done.out
    assert (
        answer(kvcache("log", "verify", tmp_path / "new", "--json", "-q"))["batches"] == reported["batches"]
    )
    assert kvcache("audit", tmp_path / "new").code == 0
    assert kvcache("log", "salvage", damaged, "--to", tmp_path / "new").code == 2


@pytest.mark.parametrize(
    "args",
    [
        ("salvage", "LOG"),
        ("repair", "LOG", "--to", "NOWHERE"),
        ("verify", "LOG", "--dry-run"),
        ("compact", "LOG", "--retain-segments", "2"),
        ("prune", "LOG", "--retain-bytes", "8"),
        ("prune", "LOG", "--retain-segments", "0"),
        ("verify", "LOG", "--retain-segments", "2"),
        ("mend", "LOG"),
        ("info", "NOWHERE"),
    ],
)
def test_errors(kvcache: Kvcache, whole: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    """What cannot be meant is an error in one line, and changes nothing."""
    before = bytes_in(whole)
    paths = {"LOG": str(whole), "NOWHERE": str(tmp_path)}
    with suppress(SystemExit):
        done = kvcache("log", *(paths.get(each, each) for each in args))
        assert done.code == 2
        assert done.err.count("\n") == 1
    assert bytes_in(whole) == before


class TestOtherCommands:
    """What they make of a log whose beginning is not kept."""

    def test_replay_begins_with_a_snapshot(self, kvcache: Kvcache, kept: Path, whole: Path) -> None:
        """By number and by time, at each batch that is kept the same as of the whole log."""
        begins = first_seq(snapshot_paths(kept)[0])
        for at in (begins, begins + 7, 380, "+6s", "+7.5s", "2026-01-01T00:00:07Z"):
            [mine, other] = [
                answer(kvcache("replay", log, "--at", at, "--json", "-q")) for log in (kept, whole)
            ]
            assert (mine["fingerprint"], mine["seq"]) == (other["fingerprint"], other["seq"])
            assert mine["snapshot_seq"] == max(
                each.seq for each in snapshots(kept) if each.seq <= mine["seq"]
            )
            [mine, other] = [kvcache("replay", log, "--at", at).out.splitlines()[0] for log in (kept, whole)]
            assert mine.partition(": ")[2] == other.partition(": ")[2]

    @pytest.mark.parametrize("moment", ["3", "+1s", "2026-01-01T00:00:01Z"])
    def test_what_is_gone_is_said(self, kvcache: Kvcache, kept: Path, moment: str) -> None:
        """A moment before what is kept is an error that says where the log begins."""
        done = kvcache("replay", kept, "--at", moment)
        assert done.code == 2
        assert f"is before the log's first batch, {first_seq(snapshot_paths(kept)[0])} (+5.4" in done.err

    @pytest.mark.parametrize(
        "args",
        [
            ("audit", "LOG"),
            ("explain", "LOG", "--request", 50),
            ("curve", "LOG"),
            ("diff", "LOG", "LOG"),
            ("report", "LOG", "-o", "page.html"),
            ("export", "LOG", "--to", "csv", "-o", "tables"),
            ("events", "LOG"),
            ("match", "LOG", "--request", 50, "--at", 380),
        ],
    )
    def test_history_begins_with_the_oldest_snapshot(
        self,
        kvcache: Kvcache,
        kept: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        args: tuple[Any, ...],
    ) -> None:
        """What is about what happened reads all that is kept, and those that judge say where it begins."""
        monkeypatch.chdir(tmp_path)
        done = kvcache(*(kept if each == "LOG" else each for each in args))
        assert done.code == 0
        says = "begins with a snapshot after batch" in done.err
        assert says == (args[0] != "match")

    def test_what_if_needs_the_beginning(self, kvcache: Kvcache, kept: Path) -> None:
        """Requests cannot be played again into a cache that held something, and that is said."""
        done = kvcache("whatif", kept, "--set", "secondary_blocks=0")
        assert done.code == 2
        assert "it begins with a cache that is not empty" in done.err

    def test_times_count_from_the_log_s_own_beginning(
        self, kvcache: Kvcache, kept: Path, whole: Path
    ) -> None:
        """Be it kept or not, so that a moment has one name."""
        [mine, other] = [
            next(
                line for line in kvcache("explain", log, "--request", 50).out.splitlines() if "ended" in line
            )
            for log in (kept, whole)
        ]
        assert mine == other

    def test_a_writer_goes_on(self, kvcache: Kvcache, kept: Path) -> None:
        """A log without its beginning is continued as any other, also where its last segment is all there is."""
        kvcache("log", "prune", kept, "--retain-segments", 1)
        done = kvcache("run", "--limit", 3, "--no-pools", *SIZES, "--log", kept, "--continue", "--keep", "-q")
        assert done.code == 0
        assert replay(kept).state.epoch == 1


def test_every_key_is_documented(kvcache: Kvcache, whole: Path, tmp_path: Path) -> None:
    """The table of docs/reference/json.md has each key that the commands say, and no other ones."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    found = set[str]()
    to, last = tmp_path / "new", segment_paths(log)[-1]
    half = last.with_name(f"{10**9:020d}.kvlog")
    last.write_bytes(last.read_bytes()[:-50])
    for args in (
        ("prune", "--retain-segments", 8),
        ("compress",),
        ("info",),
        ("repair",),
        ("verify",),
        ("salvage", "--to", to),
    ):
        if args[0] == "verify":
            middle = segment_paths(log)[3]
            middle.write_bytes(middle.read_bytes()[:-50])
        found |= set(keys_of(json.loads(kvcache("log", args[0], log, *args[1:], "--json", "-q").out)))
    half.touch()
    found |= set(keys_of(json.loads(kvcache("log", "repair", log, "--dry-run", "--json", "-q").out)))
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    section = page.partition("\n## log\n")[2].partition("\n## ")[0]
    firsts = re.findall(r"(?m)^\| (`.*?) \|", section)
    assert {word for first in firsts for word in re.findall("`([^`]+)`", first)} <= found
    named = set(re.findall("`([^`]+)`", section))
    # `kept` has what `info` has, and `end` is documented with replay.
    assert {key for key in found if key.partition(".")[0] != "end" and key.count(".") < 2} <= named
