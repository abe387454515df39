"""A NATS server with JetStream, started and killed by the tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from tests.servers import program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.02)
        else:
            return


class NATSServer:
    """Keeps its files in a directory, and its port."""

    def __init__(self, directory: Path, extra: str = "", *, jetstream: bool = True) -> None:
        self.port = free_port()
        self._config = directory / "nats.conf"
        store = f'jetstream {{ store_dir: "{directory}/js" }}' if jetstream else ""
        self._config.write_text(f"listen: 127.0.0.1:{self.port}\n{store}\n{extra}\n")
        self._program = program("nats-server")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._program, "-c", str(self._config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_listening(self.port, self._process)

    def kill(self) -> None:
        """As by kill -9."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """It stands still, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
