"""The process that keeps a log while its writer writes on: asked to whenever a segment begins, and when the log ends.

It shares nothing with the engine but the files: a line from the engine asks, one from it says that it is done, and what
went wrong. It ends with the engine, and when it was not asked for some time. It may be killed at any time, and the next
one goes on; where none can be started, the log grows, and a warning tells of it.
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
from events.errors import LogBeingKept, LogError, type_and_place
from events.log.retention import Limits, LogParts
from kvcache.keep.prune import prune

_CODE = "import sys; sys.path.append(sys.argv[1]); from kvcache.keep.keeper import main; main(*sys.argv[2:])"
_ROOT = Path(__file__).parents[2]
_NICE = 5
"""It has time until the next segment begins, unless that waits for it."""
_IDLE_SECONDS = 10.0
"""So long it waits to be asked again: to start it takes longer than a small segment."""
_END_SECONDS = 1.0
_log = get_logger(__name__)


class Keeper:
    """Has a log kept within its limits, and snapshots of it made."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory, self._limits = directory, limits
        # -P: what lies in the working directory is none of its modules.
        self._command = [sys.executable, "-P", "-c", _CODE, str(_ROOT)]
        self._command += [str(directory.absolute()), msgspec.json.encode(limits).decode()]
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._again = False
        """Whether a segment has begun while the process was at work."""

    def look(self) -> None:
        """Ask the process; if it is at work, once more when it is done. Never raises.

        Where bytes are limited, what was asked before is waited for: nothing else keeps the log from growing faster
        than it is cut. Otherwise this does not wait.
        """
        if self._limits.bytes is not None:
            self.wait()
        self._again = True
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._work, name="kvcache-keeper", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._thread = None

    def _work(self) -> None:
        while self._again:
            self._again = False
            self._run()

    def _run(self) -> None:
        try:
            # One that had nothing to do for long has ended, perhaps just now.
            said = self._answer() or self._answer()
        except (OSError, ValueError) as error:
            self._tell(type(error).__name__)
            return
        if said is None:
            self._tell(self._last_words())
        elif said.strip():
            self._tell(said.decode(errors="replace").strip())

    def _answer(self) -> bytes | None:
        """What the process says, asked once; None if it ends instead. Raises OSError, ValueError if there is none."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(  # noqa: S603 - our own code
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            # When the program ends, so do the pipes, and with them the process: the log may need it until then.
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
        """Have the log, which has ended, kept within its limits, and wait for that. Never raises."""
        self.wait()
        if self._limits and self._exceeds(self._limits):
            self.look()
            self.wait()
        if self._process is not None:
            # It has nothing to do, and might not see the end of its pipe: a forked child of the engine has that, too.
            self._process.terminate()
            _end(self._process)

    def _exceeds(self, limits: Limits) -> bool:
        try:
            return LogParts(self._directory).wanted(limits) > 0
        except (LogError, OSError):
            return True  # Whoever reads it says why it cannot be.

    def wait(self, timeout: float | None = None) -> None:
        """Wait for what is at work."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _tell(self, reason: str) -> None:
        _log.warning("log_not_kept", log=str(self._directory), reason=reason)


def _end(process: subprocess.Popen[bytes], timeout: float | None = None) -> None:
    """Let the process end, once it has done what it was asked."""
    with suppress(OSError, subprocess.TimeoutExpired):
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait(timeout)


def main(directory: str, limits: str) -> None:
    """What the process does: each time a line comes, it keeps the log, and answers with one: empty, or what failed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It is for the engine, with which this ends.
    wanted = msgspec.json.decode(limits, type=Limits)
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and sys.stdin.readline():
        sys.stdout.write(f"{_kept(Path(directory), wanted)}\n")
        sys.stdout.flush()


def _kept(directory: Path, limits: Limits) -> str:
    """Keep it, and say what failed."""
    try:
        if limits.bytes is None:
            with suppress(OSError):  # Nobody waits for it.
                os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))
        prune(directory, limits)
    except LogBeingKept:
        return ""  # Somebody else is at it.
    except Exception as error:  # noqa: BLE001 - whatever it is, one line has to say it
        # Our own errors quote nothing; of others not even the text.
        own = type(error).__module__.partition(".")[0] in ("events", "kvcache")
        return " ".join(str(error).split()) if own else type_and_place(error)
    return ""
