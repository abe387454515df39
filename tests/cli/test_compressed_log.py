"""`kvcache log compress`, and all other commands about a log that was compressed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from events.log.frames import parse_segment_header
from events.log.segments import segment_paths
from tests.support.answers import SIZES, answer
from tests.support.commands import Kvcache, run_log


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments. Not to be changed."""
    directory = tmp_path_factory.mktemp("logs") / "log"
    return run_log(directory, *SIZES, "--set", "log.segment_bytes=16000", "--set", "log.compression=none")


def test_compress(kvcache: Kvcache, whole: Path, tmp_path: Path) -> None:
    """Less than the log was, never the last segment, and a second go finds nothing to do; `info` tells which are."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    before = sum(path.stat().st_size for path in segment_paths(log)[:-1])
    done = answer(kvcache("log", "compress", log, "--json", "-q"))
    after = sum(path.stat().st_size for path in segment_paths(log)[:-1])
    assert done == {
        "compressed": len(segment_paths(log)) - 1,
        "bytes_before": before,
        "bytes": after,
        "left": 0,
    }
    assert after < before * 0.7
    assert "0 segments, 0 B to 0 B" in kvcache("log", "compress", log).out
    reported = answer(kvcache("log", "info", log, "--json"))["segments"]
    assert [each["compressed"] for each in reported] == [True] * (len(reported) - 1) + [False]
    assert kvcache("log", "info", log).out.count("  compressed ") == done["compressed"]
    middle = segment_paths(whole)[2]
    (log / middle.name).write_bytes(middle.read_bytes()[:-50])
    assert "1 segment, damaged" in kvcache("log", "compress", log).out


PLACE = 10**19
"""The number of a file that somebody has put there."""


def full_disk(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """From now on nothing more has room."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)


@pytest.mark.parametrize("call", ["writev", "fdatasync" if hasattr(os, "fdatasync") else "fsync"])
def test_a_full_disk(
    kvcache: Kvcache, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What could not be written is named, and what to do; doing that, it is done."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    before = {path.name: path.read_bytes() for path in segment_paths(log)}
    with monkeypatch.context() as patch:
        full_disk(patch, call)
        compressed = kvcache("log", "compress", log)
        salvaged = kvcache("log", "salvage", log, "--to", tmp_path / "new")
    unfinished = segment_paths(log)[0].with_suffix(".kvlog.new")
    reason = f"cannot be written: {os.strerror(errno.ENOSPC)}; free disk space or fix the disk"
    assert (compressed.code, salvaged.code) == (2, 2)
    assert f"{unfinished} {reason}, and compress again: the log is intact" in compressed.err
    assert f"{tmp_path / 'new.salvaging'} {reason}, remove this directory, and salvage" in salvaged.err
    assert {path.name: path.read_bytes() for path in segment_paths(log)} == before
    assert not unfinished.exists()
    shutil.rmtree(tmp_path / "new.salvaging")
    assert kvcache("log", "salvage", log, "--to", tmp_path / "new").code == 0
    assert kvcache("log", "compress", log).code == 0


@pytest.mark.parametrize(
    "command", [("compress",), ("verify",), ("info",), ("repair",), ("salvage", "--to", "new")]
)
def test_a_segment_that_is_a_link(
    kvcache: Kvcache, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Whatever comes upon it says which it is, and what to do."""
    monkeypatch.chdir(tmp_path)
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    path = segment_paths(log)[-1 if command == ("repair",) else 1]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    done = kvcache("log", command[0], log, *command[1:])
    assert done.code == 2
    assert f"{path.name} is a symbolic link, which is not followed: replace it by the file itself" in done.err
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    shutil.rmtree(tmp_path / "new.salvaging", ignore_errors=True)
    assert kvcache("log", command[0], log, *command[1:]).code == 0


@pytest.mark.parametrize("content", ["nothing", "noise", "another log", "this log"])
def test_a_foreign_file_after_the_last_segment(
    kvcache: Kvcache, whole: Path, tmp_path: Path, content: str
) -> None:
    """Whatever is in it: the last segment of the log is the one that may be written, and stays as it is."""
    log = Path(shutil.copytree(whole, tmp_path / "log"))
    *closed, last = segment_paths(log)
    before = last.read_bytes()
    foreign = log / f"{PLACE}.kvlog"
    foreign.write_bytes({"nothing": b"", "noise": bytes(range(256))}.get(content, last.read_bytes()))
    if content == "another log":
        header = parse_segment_header(last.read_bytes())
        assert header is not None
        foreign.write_bytes(header._replace(log_id=bytes(16), base_seq=PLACE, number=9999).pack())
    done = answer(kvcache("log", "compress", log, "--json", "-q"))
    assert (done["compressed"], done["left"]) == (len(closed), 0)
    assert last.read_bytes() == before
    assert foreign.exists()
    foreign.unlink()
    assert kvcache("log", "verify", log).code == 0


@pytest.mark.parametrize(
    "command",
    [
        ("replay",),
        ("replay", "--at", 200),
        ("log", "verify"),
        ("events",),
        ("audit",),
        ("curve",),
        ("whatif", "--jobs", 1, "--json", "--set", "eviction_policy=levels"),
        ("report", "-o", "page.html"),
        ("publish", "--once", "--sink", "file:published.jsonl"),
        ("export", "--to", "jsonl", "-o", "tables"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_says_the_same_of_a_compressed_log(
    kvcache: Kvcache, whole: Path, tmp_path: Path, command: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever reads logs reads compressed ones, and tells and writes what it does of the log as it was."""
    said = []
    for compress in (False, True):
        place = tmp_path / f"{compress}"
        log = Path(shutil.copytree(whole, place / "log"))
        if compress:
            assert answer(kvcache("log", "compress", log, "--json", "-q"))["compressed"] > 5
        monkeypatch.chdir(place)
        at = 2 if command[0] == "log" else 1
        done = kvcache(*command[:at], "log", *command[at:], "-q")
        assert done.code == 0
        written = {path.name: path.read_bytes() for path in place.glob("tables/**/*") if path.is_file()}
        written |= {path.name: path.read_bytes() for path in place.glob("p*.*")}
        assert bool(written) == (command[0] in ("publish", "report", "export"))
        said.append((done, written))
    assert said[0] == said[1]
