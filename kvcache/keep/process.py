"""The process that keeps a log while its writer writes on: started whenever a segment begins, and gone when it is done.

It shares nothing with the engine but the files. It may be killed at any time, and the next one goes on; where none can
be started, the log grows, and a warning tells of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from events.diagnostics import get_logger
from events.errors import LogBeingKept, type_and_place
from events.log.retention import Limits
from kvcache.keep.compress import compress
from kvcache.keep.prune import prune

_CODE = "import sys; sys.path.append(sys.argv[1]); from kvcache.keep.process import main; main(*sys.argv[2:])"
_ROOT = Path(__file__).parents[2]
_NICE = 5
"""It has time until the next segment begins."""
_log = get_logger(__name__)


class _Wanted(msgspec.Struct):
    """What the process is to do."""

    limits: Limits | None
    """None: neither to make snapshots nor to remove anything."""
    compress: bool


class Keeper:
    """Has a log kept within its limits (None: it is kept whole, without snapshots), and compressed where wanted."""

    def __init__(self, directory: Path, limits: Limits | None, *, compress: bool = False) -> None:
        self._directory = directory
        # -P: what lies in the working directory is none of its modules.
        self._command = [sys.executable, "-P", "-c", _CODE, str(_ROOT)]
        self._command += [str(directory.absolute()), msgspec.json.encode(_Wanted(limits, compress)).decode()]
        self._thread: threading.Thread | None = None
        self._again = False
        """Whether a segment has begun while the process was at work."""

    def look(self) -> None:
        """Start the process; if it is at work, once more when it is done. Neither waits nor raises."""
        self._again = True
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._work, name="kvcache-keeper", daemon=True)
        with suppress(RuntimeError):  # the interpreter is shutting down
            self._thread.start()

    def _work(self) -> None:
        while self._again:
            self._again = False
            self._run()

    def _run(self) -> None:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own code
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            _, said = process.communicate()
        except (OSError, ValueError) as error:
            self._tell(type(error).__name__)
            return
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            self._tell(last[0] if last else f"its process ended with {process.returncode}")

    def wait(self, timeout: float | None = None) -> None:
        """Wait for what is at work."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _tell(self, reason: str) -> None:
        _log.warning("log_not_kept", log=str(self._directory), reason=reason)


def main(directory: str, wanted: str) -> None:
    """What the process does: exit code 0, or 1 and a line on stderr."""
    with suppress(OSError):
        os.nice(_NICE)
    try:
        _keep(Path(directory), msgspec.json.decode(wanted, type=_Wanted))
    except LogBeingKept:
        return  # Somebody else is at it.
    except Exception as error:  # noqa: BLE001 - whatever it is, one line has to say it
        # Our own errors quote nothing; of others not even the text.
        own = type(error).__module__.partition(".")[0] in ("events", "kvcache")
        sys.stderr.write(f"{error if own else type_and_place(error)}\n")
        sys.exit(1)


def _keep(directory: Path, wanted: _Wanted) -> None:
    if wanted.limits is not None:
        prune(directory, wanted.limits)
    # Behind that: snapshots are made faster of what is not compressed, and what goes need not be.
    if wanted.compress:
        compress(directory)
