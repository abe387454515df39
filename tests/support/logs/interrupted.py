"""A log that goes on behind a torn end, interrupted at any call to the system; run as a program with its directory.

Reads points from stdin, one JSON line each: which policy of syncs, at the how-manieth call on the log's files, and
what happens there: the process is killed ``before`` it, ``after`` it, or in the ``middle`` of a write, or the call is
refused with an error (``EIO``, ``ENOSPC``), ``times`` times in a row; of a refused write, half is done. Each is a
process of its own, forked from this one so that it need not load anything. What has become of the log is judged here;
a line of JSON tells it. Syncs are not carried out: whoever is killed leaves what the system has.

With ``python -m tests.support.logs.interrupted LOG POLICY`` one goes on undisturbed, for others to interrupt.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from events import LogUnavailable, LogWriteFailed
from events.log import LogReader, LogWriter
from events.log import writer as recorder
from tests.support.logs.logs import LOG_ID, batch, batches, large_batch, segments, settle, write_synced

NAMES = ("open", "write", "writev", "pwrite", "fsync", "fdatasync", "ftruncate", "rename", "unlink", "mkdir")
CONTENT = [*batches(4), *(large_batch(seq, 32 * seq) if seq % 3 else batch(seq) for seq in range(4, 12))]
"""The first three are there; half of the fourth is."""


class Calls:
    """Counts the calls on files below a directory, and does something at some of them."""

    def __init__(self, root: Path, at: int, how: str, times: int = 1) -> None:
        self.root, self.at, self.how, self.times = str(root), at, how, times
        self.count = 0
        self._open: dict[int, bool] = {}
        self._lock = threading.Lock()

    def watch(self) -> None:
        """From now on; this process ends with it."""
        for name in filter(lambda name: hasattr(os, name), NAMES):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def carried_out(first: Any, *args: Any, **named: Any) -> Any:
            return None if "sync" in name else call(first, *args, **named)

        def watched(first: Any, *args: Any, **named: Any) -> Any:
            if not (self._open.get(first) if isinstance(first, int) else str(first).startswith(self.root)):
                return call(first, *args, **named)
            with self._lock:
                self.count += 1
                if self.at <= self.count < self.at + self.times:
                    self._interrupt(name, carried_out, first, *args)
                result = carried_out(first, *args, **named)
                if name == "open":
                    self._open[result] = True
                if self.count == self.at and self.how == "after":
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

        return watched

    def _interrupt(self, name: str, call: Callable[..., Any], first: Any, *args: Any) -> None:
        if self.how == "after":
            return
        if name in ("write", "writev") and self.how != "before":
            data = args[0] if name == "write" else b"".join(args[0])
            call(first, data[: len(data) // 2] if name == "write" else [data[: len(data) // 2]])
        if hasattr(errno, self.how):
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number))
        os.kill(os.getpid(), signal.SIGKILL)


def make_torn(log: Path) -> None:
    """What a writer has left that was killed."""
    write_synced(log, CONTENT[:4], log_id=LOG_ID, fsync="never")
    [path] = segments(log)
    path.write_bytes(path.read_bytes()[: -36 - 50])


def write(log: Path, fsync: Any, announce: Callable[[Any], None], calls: Calls | None) -> None:
    """Go on, as an engine would that tries again what was refused."""
    patch.multiple(recorder, _FIRST_PAUSE_SECONDS=0.001, _LONGEST_PAUSE_SECONDS=0.002).start()
    if calls is not None:
        calls.watch()
    writer: LogWriter | None = None
    while writer is None:
        with suppress(LogUnavailable):
            writer = LogWriter(log, resume=True, fsync=fsync, fsync_seconds=0.005, segment_bytes=900)
    for item in CONTENT[writer.next_seq :]:
        writer.append(item)
        with suppress(LogWriteFailed):
            writer.flush()
        announce(writer.durable_seq)
    settle(writer)
    with suppress(LogWriteFailed):
        writer.close()
    stats = writer.stats()
    announce(writer.durable_seq)
    announce(
        [
            stats.batches,
            stats.dropped_batches,
            stats.lag_batches,
            stats.durable_seq,
            calls.count if calls else 0,
        ]
    )


def announcer(pipe: int) -> Callable[[Any], None]:
    """Tells somebody who lives on, by a call that is not watched."""
    os_write = os.write

    def announce(reported: Any) -> None:
        os_write(pipe, f"{json.dumps(reported)}\n".encode())

    return announce


def child(log: Path, point: dict[str, Any], pipe: int) -> None:
    """Be the process that is interrupted; what it is told goes into the pipe."""
    announce = announcer(pipe)
    try:
        calls = Calls(log, point["at"], point["how"], point.get("times", 1))
        write(log, point["fsync"], announce, calls)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def interrupted(log: Path, point: dict[str, Any]) -> tuple[int, list[Any]]:
    """How the process has ended, and what it was told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(log, point, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = [json.loads(line) for line in pipe.read().splitlines()]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), reported


def judge(log: Path, reported: list[Any]) -> dict[str, Any]:
    """What can be read, before and after going on."""
    durable = max((each for each in reported if isinstance(each, int)), default=2)
    reader = LogReader(log)
    read = list(reader)
    assert read == CONTENT[: len(read)], "something else is read than was appended"
    assert len(read) > durable, "something that was told to be durable is lost"
    with LogWriter(log, resume=True, fsync="never") as writer:
        assert writer.next_seq == len(read)
        writer.append(batch(len(read)))
    assert list(LogReader(log)) == [*read, batch(len(read))]
    return {"read": len(read), "end": reader.end.kind, "durable": durable}


def main() -> None:
    directory = Path(sys.argv[1])
    if sys.argv[2:]:
        write(directory, sys.argv[2], announcer(sys.stdout.fileno()), None)
        return
    torn = directory / "torn"
    make_torn(torn)
    for line in sys.stdin:
        point = json.loads(line)
        log = Path(shutil.copytree(torn, directory / "log"))
        status, reported = interrupted(log, point)
        final = [each for each in reported if isinstance(each, list)]
        found = {**point, "status": status, "final": final[0] if final else None, **judge(log, reported)}
        print(json.dumps(found), flush=True)
        shutil.rmtree(log)


if __name__ == "__main__":
    main()
