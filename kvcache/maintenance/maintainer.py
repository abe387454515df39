"""Process that maintains a log while its writer is at work: on request, when a segment begins and when the log ends.

It shares nothing with the engine but the files: a line from the engine is a request, a line back reports completion or
the failure. It ends with the engine, and after some time without requests. It may be killed at any time, and the next
one continues; if none can be started, the log grows, and a warning is logged.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import msgspec

from events.diagnostics import get_logger
from events.errors import LogBusy, LogError, type_and_place
from events.log.retention import Limits, LogParts
from kvcache.maintenance.prune import prune

_CODE = "import sys; sys.path.append(sys.argv[1]); from kvcache.maintenance.maintainer import main; main(*sys.argv[2:])"
_ROOT = Path(__file__).parents[2]
_NICE = 5
"""Nice value: it has time until the next segment begins, unless that waits for it."""
_IDLE_SECONDS = 10.0
"""Idle time before it ends: starting it takes longer than a small segment."""
_END_SECONDS = 1.0
_log = get_logger(__name__)


class LogMaintainer:
    """Client of the process that maintains a log within its limits and makes its snapshots."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory, self._limits = directory, limits
        # -P: files in the working directory are none of its modules.
        self._command = [sys.executable, "-P", "-c", _CODE, str(_ROOT)]
        self._command += [str(directory.absolute()), msgspec.json.encode(limits).decode()]
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._again = False
        """True if a segment has begun while the process was at work."""

    def look(self) -> None:
        """Send a request; if the process is at work, send another one when it is done. Never raises.

        If bytes are limited, this waits for the previous request: nothing else prevents the log from growing faster
        than it is cut. Otherwise it does not wait.
        """
        if self._limits.bytes is not None:
            self.wait()
        self._again = True
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="kvcache-keeper", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None

    def _run(self) -> None:
        while self._again:
            self._again = False
            try:
                # A process that was idle for long has ended, perhaps just now.
                answer = self._answer() or self._answer()
                reason = self._last_words() if answer is None else answer.decode(errors="replace").strip()
            except (OSError, ValueError) as error:
                reason = type(error).__name__
            if reason:
                _log.warning("log_not_kept", log=str(self._directory), reason=reason)

    def _answer(self) -> bytes | None:
        """Return the answer to one request; None if the process ends instead. Raises OSError, or ValueError for
        none.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(  # noqa: S603 - our own code
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            # The pipes end with the program, and the process with them: the log may need it until then.
            weakref.finalize(self, _end, process, _END_SECONDS).atexit = False
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
        return process.stdout.readline() or None

    def _last_words(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        assert process.stderr is not None
        last = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return last[0] if last else f"its process ended with {process.wait()}"

    def close(self) -> None:
        """Maintain the log, which has ended, once more, and wait for that. Never raises."""
        self.wait()
        if self._limits and self._exceeds(self._limits):
            self.look()
            self.wait()
        if self._process is not None:
            # It is idle, and might not see its pipe closed, because a forked child of the engine also has it.
            self._process.terminate()
            _end(self._process)

    def _exceeds(self, limits: Limits) -> bool:
        try:
            return LogParts(self._directory).wanted(limits) > 0
        except (LogError, OSError):
            return True  # A reader of the log reports the reason.

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the request in progress."""
        if self._thread is not None:
            self._thread.join(timeout)


def _end(process: subprocess.Popen[bytes], timeout: float | None = None) -> None:
    """Let the process end after its current request."""
    with suppress(OSError, subprocess.TimeoutExpired):
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait(timeout)


def main(directory: str, limits: str) -> None:
    """Serve requests: for each line, maintain the log, and answer with a line, empty or with the failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT is for the engine, with which this ends.
    wanted = msgspec.json.decode(limits, type=Limits)
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and sys.stdin.readline():
        sys.stdout.write(f"{_kept(Path(directory), wanted)}\n")
        sys.stdout.flush()


def _kept(directory: Path, limits: Limits) -> str:
    """Maintain the log; return the failure, if any."""
    try:
        if limits.bytes is None:
            with suppress(OSError):  # The request is not awaited.
                os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))
        prune(directory, limits)
    except LogBusy:
        return ""  # Another process is at work.
    except Exception as error:  # noqa: BLE001 - whatever it is, one line has to say it
        # Errors of this library quote no data; of others the text is left out.
        own = type(error).__module__.partition(".")[0] in ("events", "kvcache")
        return " ".join(str(error).split()) if own else type_and_place(error)
    return ""
