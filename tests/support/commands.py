"""What the tests of the command share: calling it in this process and in its own, and logs to read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from events.tokens import symbols
from kvcache import KVCacheConfig, KVCacheManager, MultimodalItem
from kvcache.cli import main
from tests.support.places import ROOT

TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Kvcache = Callable[..., Done]
Start = Callable[..., "subprocess.Popen[str]"]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def quiet_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith("KVCACHE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def kvcache(capsys: pytest.CaptureFixture[str]) -> Kvcache:
    """Call the command in this process."""

    def call(*args: Any) -> Done:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command as a process of its own, in an empty directory, with TMPDIR there."""
    processes: list[subprocess.Popen[str]] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def begin(*args: Any, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcache", *map(str, args)],
            cwd=tmp_path,
            # Unbuffered output would hide that something is not flushed.
            env={**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def run_log(directory: Path, *options: Any) -> Path:
    """Write a log by a small run."""
    args = ["run", TRACE, "--no-pools", "--tokens-per-block", 16, "-q", "--log", directory, *options]
    assert main([str(arg) for arg in args]) == 0
    return directory


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a run that moved blocks to secondary and back. Not to be changed."""
    directory = tmp_path_factory.mktemp("logs") / "log"
    return run_log(directory, "--primary-blocks", 120, "--secondary-blocks", 100, "--concurrency", 3)


def segments(directory: Path) -> list[Path]:
    """The log's files."""
    return sorted(directory.glob("*.kvlog"))


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of four images one after the other, in a cache with room for one at a time."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 1)
    config = KVCacheConfig(max_sequence_length=12, tokens_per_block=4, primary_blocks=3)
    with KVCacheManager(config, log=tmp_path / "images") as manager:
        for number in range(4):
            item = MultimodalItem(bytes([number]) * 32, 0, 8)
            manager.add_sequence(number, [7] * 9, multimodal=[item])
            manager.flush()
            manager.store_context_blocks(number, 9)
            manager.remove_sequence(number)
            manager.flush()
    return tmp_path / "images"


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a fresh interpreter, in an empty directory, with `path` before the project on the import path."""

    def run(
        code: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        import_path = os.pathsep.join(str(entry) for entry in (*path, ROOT))
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": import_path, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run
