"""A cache that is killed while it starts: run as a program, with a directory, and points from stdin.

A point is a line of JSON: who keeps something in the log's directory, and the number of the call on files there
before which the process is killed; 0: none. Each is a process of its own, forked from this
one. Then a cache is started there once more. A line of JSON for each point: how many calls there were, or null if it
was killed, and how many batches the log has in the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

from events.log import LogReader, LogWriter
from events.types import EventBatch
from kvcache.manager import KVCacheManager
from kvcache.publish.start import Position, position_file
from sinks import Sink, SinkContext, open_sink
from tests.support.engines import strategies
from tests.support.logs.interrupted import Calls

KEEPERS = ("feed", "sidecar", "note")
CONTEXT = SinkContext(8, 2, "m")


class KeepsANote(Sink):
    """A sink of somebody else, which keeps a file in the log's directory."""

    def __init__(self, directory: Path) -> None:
        self._note = directory / "somebody's note"

    def open(self) -> None:
        self._note.touch()

    def write(self, batch: EventBatch) -> None:
        with self._note.open("w") as file:
            file.write(str(batch.seq))

    def close(self) -> None:
        self._note.unlink(missing_ok=True)


def keeper(name: str, log: Path) -> Sink:
    """One of `KEEPERS`."""
    if name == "note":
        return KeepsANote(log)
    if name == "sidecar":
        position = position_file(log, "file:events")
        position.open()
        position.save(Position("00", 0, 0))
        position.close()
        return open_sink("file:/dev/null", CONTEXT)
    return open_sink(f"zmq+pub://127.0.0.1:0?state={log}/feed-127.0.0.1-5557.numbers", CONTEXT)


def live(log: Path, name: str) -> None:
    """A cache, from start to end."""
    if name == "sidecar":
        keeper(name, log)  # It may come before the engine.
    writer = LogWriter(log, resume=True, fsync="never")
    config = strategies.config(max_sequence_length=8)
    with KVCacheManager(config, log=writer, sinks=[keeper(name, log)]) as manager:
        manager.add_sequence("r", [1, 2, 3, 4])
        manager.store_context_blocks("r", 4)
        manager.flush()
        manager.remove_sequence("r")


def killed(log: Path, name: str, at: int) -> int | None:
    """The calls of a whole life; None: it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = Calls(log, at, "before")
        calls.watch()
        try:
            live(log, name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os.write(writing, str(calls.count).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        reported = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (0 if reported else -9), status
    return int(reported) if reported else None


def main() -> None:
    log = Path(sys.argv[1]) / "log"
    for line in sys.stdin:
        name, at = json.loads(line)
        calls = killed(log, name, at)
        live(log, name)
        print(json.dumps([calls, sum(1 for _ in LogReader(log))]), flush=True)
        shutil.rmtree(log)


if __name__ == "__main__":
    main()
