"""uvicorn as a part of a program, at any free port of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette


class Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    def __init__(self, app: Starlette) -> None:
        # Connections stay open: one that the server closes looks to the balancer as if the worker had gone.
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_keep_alive=3600, lifespan="off"
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C ends the program, which ends the server."""
        yield

    def end(self) -> None:
        """Do not wait for who is connected."""
        self.should_exit = self.force_exit = True


def free_socket(port: int = 0) -> socket.socket:
    """A bound socket; 0 is any free port."""
    return socket.create_server(("127.0.0.1", port))


def address_of(bound: socket.socket) -> str:
    """Its URL."""
    return f"http://127.0.0.1:{bound.getsockname()[1]}"
