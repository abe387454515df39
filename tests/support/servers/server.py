"""A broker's process, as tests start, stop and kill it, and look into its streams past our readers."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Self

from tests.support.ports import free_port
from tests.support.waiting import wait_until

STREAM = "kvcache"


class Server:
    """Keeps its files in a directory, and its port. What its subclasses are is told by `scheme`."""

    scheme: str
    store: str
    """The directory in its own one in which it keeps streams."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.stream = STREAM
        self.directory = directory
        self.command: list[str] = []

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._listens, "the server does not listen")

    def _listens(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        return self.answers()

    def answers(self) -> bool:
        """Whether it takes what is asked of it."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """As by kill -9."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """It stands still, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    # --- what is in it

    def remember(self) -> None:
        """Take a copy of what it has on the disk now; it stands still meanwhile."""
        self.stop()
        shutil.rmtree(self.directory / "before", ignore_errors=True)
        shutil.copytree(self.directory / self.store, self.directory / "before")
        self.go_on()

    def lose_end(self) -> None:
        """It crashes, with the machine: what came since `remember` had not reached the disk. It is down then."""
        self.kill()
        shutil.rmtree(self.directory / self.store)
        shutil.copytree(self.directory / "before", self.directory / self.store)

    def lose_all(self) -> None:
        """It crashes, and has nothing more. It is down then."""
        self.kill()
        shutil.rmtree(self.directory / self.store)

    def empty(self) -> None:
        """Somebody removes all messages, while it is running."""
        raise NotImplementedError

    def drop(self, worker: str) -> None:
        """Somebody removes one worker's messages."""
        raise NotImplementedError

    def records(self, worker: str) -> list[tuple[str, bytes]]:
        """Tag and payload of all that a worker has in the stream."""
        raise NotImplementedError

    def tags(self, worker: str) -> list[str]:
        return [tag for tag, _ in self.records(worker)]

    def numbers(self, worker: str) -> list[int]:
        """Those of the batches that are in the stream."""
        return [int(tag) for tag in self.tags(worker) if "/" not in tag]
