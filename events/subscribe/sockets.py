"""Settings of the ZeroMQ sockets at both ends of a router feed: encryption (CURVE), authorisation, keepalive.

Both ends have a key pair, in files in the format of `zmq.auth`. The end that *connects* is the client and knows the
other's public key beforehand; the end that *binds* is the server and has a directory with the keys of the clients that
it accepts (`Gate`): ZeroMQ sends a query for each client (its ZAP protocol), which `zmq.auth` answers on its own
thread.

SECURITY: the secret stays in `KeyPair.secret`, which no `repr`, message or log shows. A file with a secret that others
may read, or that a group may write, is refused.
"""

from __future__ import annotations

import ipaddress
import stat
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from events.diagnostics import get_logger
from events.errors import EventsError, UnsafeFile, system_reason
from events.files.safe import refuse_foreign

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator


WILDCARDS = ("*", "0.0.0.0", "::")  # noqa: S104  not bound here, but recognized


def is_wildcard(host: str) -> bool:
    """Return True if it stands for every address of this machine, so that it can only be bound."""
    return host in WILDCARDS


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches it. A name other than the usual ones may be any machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo", "lo0")


def tcp_address(host: str, port: int) -> str:
    """Return the address as ZeroMQ writes it, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


_KEEPALIVE_SECONDS = 60
_PROBES = 6


def set_keepalive(socket: zmq.Socket[bytes]) -> None:
    """Enable probes after a minute of silence, and give the connection up after another minute.

    For all TCP connections of a socket, to be set before it is bound or connects.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_SECONDS // _PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)


_FINAL = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
SEEN_BY_SERVER = _FINAL
"""Final events at a bound socket, at which the third kind only means a disconnection, as of a port scan."""
SEEN_BY_CLIENT = _FINAL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""Final events at a connecting socket, at which it may mean that the server rejected the handshake."""
REASONS = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "a peer's key is not among the allowed ones",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "a peer has no key or a wrong one, or does not use ZeroMQ",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "a peer closed the connection before keys were exchanged",
}


def is_final(event: int) -> bool:
    """Return True if ZeroMQ does not reconnect by itself after this event."""
    return bool(event & _FINAL)


DOMAIN = "kvcache"
"""The domain of every encrypted server, under which clients are authenticated."""
_SECRET_FORBIDS = stat.S_IRWXO | stat.S_IWGRP
"""Forbidden mode bits of secret files. A group may read one, as in a Kubernetes volume with an fsGroup."""
_PUBLIC_FORBIDS = stat.S_IWOTH | stat.S_IWGRP
_MAKE_KEYS = (
    "(umask 077; python -c \"import zmq.auth; zmq.auth.create_certificates('.', 'NAME')\") makes a pair"
)


@dataclass(eq=False, repr=False)
class KeyFileError(EventsError):
    """A file or directory of keys that cannot be used; `reason` states why, without its content."""

    path: Path
    reason: str
    text = "{path}: {reason}"


class CurveUnavailable(EventsError):
    """ZeroMQ's library on this machine has no encryption."""

    def __str__(self) -> str:
        return "this build of ZeroMQ has no CURVE encryption: install pyzmq from its wheel, or libzmq with libsodium"


@dataclass(frozen=True)
class KeyPair:
    """A public key, and the secret that belongs to it; both as Z85 text of 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Curve:
    """Our keys and those of the other end."""

    own: KeyPair
    server: bytes | None = None
    """The public key of the server to connect to."""
    clients: Path | None = None
    """A directory with the public keys of accepted clients."""

    @classmethod
    def read(cls, key: Path, *, server: Path | None = None, clients: Path | None = None) -> Curve:
        """Read from files: our pair (``NAME.key_secret``), the server's public key (``NAME.key``), the clients'
        directory.

        Raises KeyFileError, and CurveUnavailable if encryption is not possible at all.
        """
        if not zmq.has("curve"):
            raise CurveUnavailable
        if clients is not None:
            read_directory(clients)
        return cls(read_pair(key), None if server is None else read_public(server), clients)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket the encrypted server; before it is bound."""
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_server = True
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if nothing answers for it, no client enters

    def call(self, socket: zmq.Socket[bytes], server: bytes | None = None) -> None:
        """Make a socket the client of `server`, by default our own; before it connects."""
        key = server or self.server
        assert key is not None
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_serverkey = key


def read_pair(path: Path) -> KeyPair:
    """Read a pair from its file; raises KeyFileError."""
    public, secret = _load(path, _SECRET_FORBIDS)
    if secret is None:
        raise KeyFileError(path, f"it has no secret key: give the file NAME.key_secret; {_MAKE_KEYS}")
    try:
        belongs = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        belongs = False
    if not belongs:
        raise KeyFileError(path, "its public key does not match its secret key")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """Read a public key from its file; raises KeyFileError."""
    return _load(path, _PUBLIC_FORBIDS)[0]


def read_directory(directory: Path) -> frozenset[bytes]:
    """Return all public keys ``*.key`` in a directory; raises KeyFileError for an unreadable one or if none exist."""
    keys, wrong = sort_directory(directory)
    if wrong:
        raise wrong[0]
    if not keys:
        raise KeyFileError(directory, "it has no client keys (NAME.key), so no client could connect")
    return keys


def sort_directory(directory: Path) -> tuple[frozenset[bytes], list[KeyFileError]]:
    """Return the public keys ``*.key`` in a directory, and the errors of the other files of such a name.

    Raises KeyFileError if the directory cannot be trusted.
    """
    _check_mode(directory, _PUBLIC_FORBIDS)
    keys, wrong = set(), []
    for path in sorted(directory.glob("*.key")):
        try:
            keys.add(read_public(path))
        except KeyFileError as error:
            wrong.append(error)
    return frozenset(keys), wrong


def _load(path: Path, forbidden: int) -> tuple[bytes, bytes | None]:
    # Here, because it imports asyncio.
    from zmq.auth import load_certificate

    _check_mode(path, forbidden)
    try:
        public, secret = load_certificate(path)
    except OSError as error:
        raise KeyFileError(path, system_reason(error, "it cannot be read")) from None
    except (ValueError, IndexError):
        # SECURITY: the error may quote a line of the file.
        raise KeyFileError(path, f"it is not a key file; {_MAKE_KEYS}") from None
    if not all(key is None or _is_key(key) for key in (public, secret)):
        raise KeyFileError(path, "its keys must have 40 characters of Z85")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (ValueError, KeyError, struct.error):
        return False


def _check_mode(path: Path, forbidden: int) -> None:
    try:
        refuse_foreign(path, path.stat(), forbidden, one_name=False, strict=True)
    except UnsafeFile as unsafe:
        reason = f"{unsafe.reason}; {unsafe.advice}, and create new keys if they may have been exposed"
        raise KeyFileError(path, reason) from None
    except (OSError, ValueError) as error:
        raise KeyFileError(path, system_reason(error, "no such path")) from None


LOOK_SECONDS = 1.0
MAX_REPORTED_KEYS = 100
"""Limit of logged keys that are refused, each once: clients that make new ones must not fill the log."""

_log = get_logger("sockets")


class Gate:
    """Authenticates clients of all encrypted servers of a context, from `open` to `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._context, self._clients = context, clients
        self._keys = read_directory(clients)
        self._looked_at = time.monotonic()
        self._handler: ThreadAuthenticator | None = None
        self._reported_keys: set[bytes] = set()
        self._wrong: list[str] = []
        """Errors of the directory's files at the last look."""
        self.refused = 0
        """Clients refused because their key is not in the directory."""

    def open(self) -> None:
        """Begin; before a server is bound."""
        from zmq.auth.thread import ThreadAuthenticator

        self._handler = ThreadAuthenticator(self._context)
        self._handler.start()
        self._handler.configure_curve_callback(DOMAIN, credentials_provider=self)

    def close(self) -> None:
        """End; connected clients stay. May be called twice."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if a client with this public key is accepted; called by `zmq.auth`, on its thread."""
        del domain
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look_again()
        allowed = key in self._keys
        self.refused += not allowed
        if not (allowed or key in self._reported_keys) and len(self._reported_keys) < MAX_REPORTED_KEYS:
            # A key that was forgotten can be added; it is public.
            self._reported_keys.add(key)
            _log.warning("key_refused", key=key.decode(errors="replace"), directory=str(self._clients))
        return allowed

    def _look_again(self) -> None:
        # A client with an unreadable file may have been removed from the list.
        try:
            self._keys, errors = sort_directory(self._clients)
        except KeyFileError as error:
            self._keys, errors = frozenset(), [error]
        wrong = [str(error) for error in errors]
        for reason in wrong:
            if reason not in self._wrong:
                _log.error("allow_list_unreadable", reason=reason)
        self._wrong = wrong
