"""Embedded uvicorn, on any free port of the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette


class Server(uvicorn.Server):
    """Server that leaves signals to the program."""

    def __init__(self, app: Starlette) -> None:
        # Connections stay open: a closed one looks to the balancer like a dead worker.
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_keep_alive=3600, lifespan="off"
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: Ctrl-C ends the program, which ends the server."""
        yield

    def end(self) -> None:
        """Stop without waiting for open connections."""
        self.should_exit = self.force_exit = True


def free_socket(port: int = 0) -> socket.socket:
    """Return a bound socket; port 0 is any free one."""
    return socket.create_server(("127.0.0.1", port))


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    return f"http://127.0.0.1:{bound.getsockname()[1]}"
