"""What the tests of the command share: calling it in this process and in its own, and logs to read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from events.tokens import symbols
from kvcache import KVCacheConfig, KVCacheManager, MultimodalItem
from kvcache.cli import main
from tests.support.forked import Forked
from tests.support.places import ROOT

TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Kvcache = Callable[..., Done]
Start = Callable[..., Forked]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Play = Callable[[str], Done]


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
    processes: list[Forked] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def begin(*args: Any, **options: Any) -> Forked:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
        process = Forked("kvcache", *args, cwd=tmp_path, env=environment, **options)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def run_log(directory: Path, *options: Any, trace: Path = TRACE) -> Path:
    """Write a log by a small run."""
    args = ["run", trace, "--no-pools", "--tokens-per-block", 16, "-q", "--log", directory, *options]
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
def stand_in_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `kvcache doctor` finds of torch on a machine without a GPU; torch itself takes seconds to load."""
    torch: Any = ModuleType("torch")
    torch.version = SimpleNamespace(cuda=None)
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Play:
    """Run code as a program in this process, in an empty directory: examples, for which no interpreter need start."""

    def call(code: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["<example>"])
        capfd.readouterr()
        exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
        return Done(0, *capfd.readouterr())

    return call


def python(
    directory: Path,
    code: str,
    *args: str,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in that directory, with `path` before the project on the import path."""
    import_path = os.pathsep.join(str(entry) for entry in (*path, ROOT))
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": import_path, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def fork_python(tmp_path: Path) -> RunPython:
    """Run code in an empty directory, in a process that begins with everything imported."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        process = Forked(code, cwd=tmp_path)
        out, err = process.communicate(timeout=60)
        assert process.returncode is not None
        return subprocess.CompletedProcess(code, process.returncode, out, err)

    return run


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Call `python` in an empty directory."""

    def run(
        code: str, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return python(tmp_path, code, path=path, env=env)

    return run
