"""The HTTP server of the metrics, which whoever reaches its port can neither fill nor hold up.

A connection has ten seconds for all that it wants, TLS included, and there are at most 32: who comes then takes the
place of the oldest one, so that Prometheus gets through to a port that somebody else occupies.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
import time
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS = 32
MAX_SECONDS = 10.0
"""A connection's life."""
_LOOK_SECONDS = 0.5
"""How often connections are looked at that are too old; whoever stops the server waits as long."""
_LEAVE_SECONDS = 0.2
"""How long the oldest connection's thread may take to end before a new one is turned away."""
_PAUSE_SECONDS = 0.1
"""After a connection that could not be taken: without it, one that waits while no file can be opened is tried again
and again."""


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base's name
        """Say nothing about who asks."""


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens on `host` ("": all addresses) at `port` (0: any that is free), once it is made. Raises OSError.

    With `tls` it speaks HTTPS only.
    """

    daemon_threads = True
    request_queue_size = 128
    """Of connections that were not taken yet; where there is no room, the system lets who comes wait for a second."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._since: dict[socket.socket, float] = {}
        """When each connection began; the oldest is the first."""
        self._lock = threading.Lock()
        address = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104  as the URL says
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        super().__init__((address, port), _SilentHandler)
        if tls is not None:
            # The handshake is left to the connection's own thread.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        """Take the address, without asking the network for its name as HTTPServer does."""
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def serve(self) -> None:
        """Answer, until `shutdown` is called."""
        self.serve_forever(_LOOK_SECONDS)

    # -- of socketserver

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection. What goes wrong, as where no file can be opened, passes."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Have a thread answer, if there is a place."""
        if not (self._places.acquire(blocking=False) or self._free_place()):
            self.shutdown_request(request)
            return
        with self._lock:
            self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer; on a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """Hang up on who is there for too long."""
        now = time.monotonic()
        with self._lock:
            for connection, since in self._since.items():
                if now - since > MAX_SECONDS:
                    _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever knocks could fill the log."""

    # -- connections

    def _free_place(self) -> bool:
        with self._lock:
            for oldest in self._since:
                _hang_up(oldest)
                break
        return self._places.acquire(timeout=_LEAVE_SECONDS)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            del self._since[request]
        self._places.release()


def tls_context(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """What encrypts; with `client_cafile` for those only who have a certificate of that authority. Raises OSError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certfile, keyfile)
    if client_cafile is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_cafile)
    return context


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        # TLS has nothing to say any more.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
