"""Programs of ours as processes that begin with everything imported: forks of one process that has done so once.

An interpreter of its own takes half a second of CPU to import what a command needs, which is most of what a short test
takes. What a process loads, and how an interpreter starts and ends, is looked at in real ones: `commands.python`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

from tests.support.places import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = [
    "rich.console",
    "rich.progress",
    "rich.table",
    "tests.support.feeds.chaos",
    *(
        f"kvcache.cli.{path.stem}"
        for path in sorted((ROOT / "kvcache" / "cli").glob("*.py"))
        if path.stem != "__init__"
    ),
]
"""What the server imports before it forks: all that commands load, and nothing of torch."""
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL


def _start_server() -> None:
    """Start the server, which imports what it is given when it begins, from this project."""
    CONTEXT.set_forkserver_preload(IMPORTED)
    # Forking with threads of a library for linear algebra is not safe, and a socket's path is short: it does not fit
    # in a directory of a test.
    surroundings = {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "",
    }
    with mock.patch.dict(os.environ, surroundings), mock.patch.object(tempfile, "tempdir", None):
        forkserver.ensure_running()


class Forked:
    """A process that runs a module as `python -m` does, or code as `python -c` does; used like `subprocess.Popen`."""

    def __init__(
        self,
        program: str,
        /,
        *args: Any,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[str] = DEVNULL,
        stdout: int | IO[str] = PIPE,
        stderr: int | IO[str] = PIPE,
        start_new_session: bool = False,
    ) -> None:
        """Begin.

        Args:
            program: A module's name, or code if it has several words.
            args: What follows in `sys.argv`.
            cwd: The directory that it begins in.
            env: The variables of its environment; those of this process without.
            stdin: `PIPE`, `DEVNULL`, a file or a descriptor, as are `stdout` and `stderr`.
            stdout: See `stdin`.
            stderr: See `stdin`.
            start_new_session: Whether it leads a session of its own.
        """
        _start_server()
        self.stdin, its_stdin = _ends(stdin, "w")
        self.stdout, its_stdout = _ends(stdout, "r")
        self.stderr, its_stderr = _ends(stderr, "r")
        theirs = its_stdin, its_stdout, its_stderr
        self._process = CONTEXT.Process(
            target=_run,
            args=(
                program,
                list(map(str, args)),
                str(cwd),
                dict(env or os.environ),
                theirs,
                start_new_session,
            ),
        )
        self._process.start()
        for end in theirs:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or a signal's number below zero, once the process has ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended: the server may know that some time before this process does."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write all of `text`, read all that is said, and wait for the end; '' for what is no pipe."""
        said = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                said[name] = stream.read()

        streams = [(name, stream) for name in said if (stream := getattr(self, name)) and not stream.closed]
        threads = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for thread in threads:
            thread.start()
        if self.stdin is not None and not self.stdin.closed:
            with self.stdin:
                self.stdin.write(text or "")
        self.wait(timeout)
        for thread in threads:
            thread.join()
        return said["stdout"], said["stderr"]


def _ends(stream: int | IO[str], mode: str) -> tuple[IO[str] | None, Connection[Any, Any]]:
    """Return our end of a pipe, if it is one, and the end or the file of the process."""
    if stream == PIPE:
        reader, writer = CONTEXT.Pipe(duplex=False)
        own, its = (writer, reader) if mode == "w" else (reader, writer)
        with own:
            return os.fdopen(os.dup(own.fileno()), mode, encoding="utf-8"), its
    if stream == DEVNULL:
        return None, Connection(os.open(os.devnull, os.O_RDWR))
    return None, Connection(os.dup(stream if isinstance(stream, int) else stream.fileno()))


def _run(
    program: str,
    args: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    streams: Sequence[Connection[Any, Any]],
    start_new_session: bool,
) -> None:
    """Be that process, from its fork to its end."""
    if start_new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout, sys.stderr = (_opened(number) for number in range(3))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.argv = [program, *args]
    try:
        if " " in program:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.modules.pop(program, None)  # it may be imported by another one that is
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        # What the interpreter does at its end, which a fork does not come to.
        finish: Callable[[], None] = atexit._run_exitfuncs
        finish()


def _opened(number: int) -> io.TextIOWrapper:
    """Open a standard stream as the interpreter does."""
    encoding = os.environ.get("PYTHONIOENCODING") or "utf-8"
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding)
    binary = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(
        binary,
        encoding,
        "backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or os.isatty(number),
    )
