"""A Redis server, started and killed by the tests."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Self

from tests.brokers.nats_server import free_port, wait_until_listening
from tests.servers import program


class RedisServer:
    """Keeps its files in a directory, and its port. Everything that it acknowledges is on the disk."""

    def __init__(self, directory: Path, *extra: str, tls: tuple[Path, Path] | None = None) -> None:
        self.port = free_port()
        ports = ["--port", str(self.port)]
        if tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += ["--tls-cert-file", str(tls[0]), "--tls-key-file", str(tls[1])]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._command = [
            program("redis-server"),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(directory),
            *ports,
            *durable,
        ]
        self._command += extra

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
