"""`kvcache log compress`, and all other commands about a log that was compressed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from events.log.segments import segment_paths
from tests.cli.conftest import Kvcache, run_log
from tests.cli.test_log import SIZES, answer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of many segments. Not to be changed."""
    directory = tmp_path_factory.mktemp("logs") / "log"
    return run_log(directory, *SIZES, "--set", "log.segment_bytes=16000")


def test_compress(kvcache: Kvcache, whole: Path, tmp_path: Path) -> None:
    """Less than the log was, never the last segment, and a second go finds nothing to do; `info` tells both sizes."""
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
    told = answer(kvcache("log", "info", log, "--json"))["segments"]
    assert sum(each["bytes_before"] for each in told[:-1]) == before
    assert told[-1]["bytes_before"] == told[-1]["bytes"]
    assert kvcache("log", "info", log).out.count("  compressed ") == done["compressed"]
    middle = segment_paths(whole)[2]
    (log / middle.name).write_bytes(middle.read_bytes()[:-50])
    assert "1 segment, damaged" in kvcache("log", "compress", log).out


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
