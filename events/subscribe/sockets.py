"""What both ends of a router feed set on their ZeroMQ sockets: encryption (CURVE), who may connect, keepalive.

Both ends have a key pair, in files in the format of `zmq.auth`. Whoever *connects* is the client and knows the other's
public key beforehand; whoever *binds* is the server and has a directory with the keys of the clients that it accepts
(`Gate`): ZeroMQ asks about each client (its ZAP protocol), and `zmq.auth` answers on a thread of its own.

SECURITY: what is secret stays in `KeyPair.secret`, which no `repr`, message or log shows. A file with a secret that
others may read, or that a group may write, is refused.
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
    """Whether it is every address of this machine, so that only binding makes sense."""
    return host in WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name other than the usual ones may be anybody's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo", "lo0")


def tcp_address(host: str, port: int) -> str:
    """As ZeroMQ writes it, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


_KEEPALIVE_SECONDS = 60
_PROBES = 6


def set_keepalive(socket: zmq.Socket[bytes]) -> None:
    """Probe after a minute of silence, and give the connection up after as long again.

    For all TCP connections of a socket, to be set before it is bound or connects.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_SECONDS // _PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)


_FINAL = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
SEEN_BY_SERVER = _FINAL
"""To who is bound the third kind only says that somebody went away, as who does who just looks."""
SEEN_BY_CLIENT = _FINAL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
"""To who connects it may mean that the server did not like what it heard, and hung up."""
REASONS = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "a key is not on the list of those that may connect",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "one end has no key, or the wrong one, or is no ZeroMQ",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "the other end hung up before keys were compared",
}


def is_final(event: int) -> bool:
    """Whether ZeroMQ does not connect again by itself after this."""
    return bool(event & _FINAL)


DOMAIN = "kvcache"
"""Named on every encrypted server; who comes is asked about under this name."""
_SECRET_FORBIDS = stat.S_IRWXO | stat.S_IWGRP
"""A group may read it, as in a Kubernetes volume with an fsGroup."""
_PUBLIC_FORBIDS = stat.S_IWOTH | stat.S_IWGRP
_MAKE_KEYS = (
    "(umask 077; python -c \"import zmq.auth; zmq.auth.create_certificates('.', 'NAME')\") makes a pair"
)


@dataclass(eq=False, repr=False)
class KeyFileError(EventsError):
    """A file or directory of keys that cannot be used; `reason` says why and repeats nothing of it."""

    path: Path
    reason: str
    text = "{path}: {reason}"


class CurveUnavailable(EventsError):
    """ZeroMQ's library on this machine cannot encrypt."""

    def __str__(self) -> str:
        return "this build of ZeroMQ has no CURVE encryption: install pyzmq from its wheel, or libzmq with libsodium"


@dataclass(frozen=True)
class KeyPair:
    """A public key, for all to know, and the secret that belongs to it; both as Z85 text of 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Curve:
    """Who we are, and whom we talk to."""

    own: KeyPair
    server: bytes | None = None
    """The public key of who we connect to."""
    clients: Path | None = None
    """A directory with the public keys of those that may connect to us."""

    @classmethod
    def read(cls, key: Path, *, server: Path | None = None, clients: Path | None = None) -> Curve:
        """From files: our pair (``NAME.key_secret``), the server's public key (``NAME.key``), the clients' directory.

        Raises KeyFileError, and CurveUnavailable where encryption is not possible at all.
        """
        if not zmq.has("curve"):
            raise CurveUnavailable
        if clients is not None:
            read_directory(clients)
        return cls(read_pair(key), None if server is None else read_public(server), clients)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket the encrypted server; to be done before it is bound."""
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_server = True
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # where nobody answers for the domain, nobody gets in

    def call(self, socket: zmq.Socket[bytes], server: bytes | None = None) -> None:
        """Make a socket the client of `server`, by default our own; to be done before it connects."""
        key = server or self.server
        assert key is not None
        socket.curve_publickey, socket.curve_secretkey = self.own.public, self.own.secret
        socket.curve_serverkey = key


def read_pair(path: Path) -> KeyPair:
    """A pair from its file; raises KeyFileError."""
    public, secret = _load(path, _SECRET_FORBIDS)
    if secret is None:
        raise KeyFileError(path, f"it has no secret key: give the file NAME.key_secret; {_MAKE_KEYS}")
    try:
        belongs = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        belongs = False
    if not belongs:
        raise KeyFileError(path, "its public key does not belong to its secret key")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """A public key from its file; raises KeyFileError."""
    return _load(path, _PUBLIC_FORBIDS)[0]


def read_directory(directory: Path) -> frozenset[bytes]:
    """All public keys ``*.key`` in a directory; raises KeyFileError for any that is wrong, and if there is none."""
    keys, wrong = sort_directory(directory)
    if wrong:
        raise wrong[0]
    if not keys:
        raise KeyFileError(directory, "it has no keys of clients (NAME.key), so that nobody could connect")
    return keys


def sort_directory(directory: Path) -> tuple[frozenset[bytes], list[KeyFileError]]:
    """The public keys ``*.key`` in a directory, and what is wrong with the other files of such a name.

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
    # Here, because it brings asyncio along.
    from zmq.auth import load_certificate

    _check_mode(path, forbidden)
    try:
        public, secret = load_certificate(path)
    except OSError as error:
        raise KeyFileError(path, system_reason(error, "it cannot be read")) from None
    except (ValueError, IndexError):
        # SECURITY: what is wrong may quote a line of the file.
        raise KeyFileError(path, f"it is no key file; {_MAKE_KEYS}") from None
    if not all(key is None or _is_key(key) for key in (public, secret)):
        raise KeyFileError(path, "its keys are not the 40 characters of Z85 that a key has")
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
        reason = f"{unsafe.reason}; {unsafe.advice}, and make new keys if they may have been seen or replaced"
        raise KeyFileError(path, reason) from None
    except (OSError, ValueError) as error:
        raise KeyFileError(path, system_reason(error, "there is no such path")) from None


LOOK_SECONDS = 1.0
KEYS_TOLD = 100
"""Of the keys that are turned away so many are logged, each once: whoever makes new ones must not fill the log."""

_log = get_logger("sockets")


class Gate:
    """Stands before all encrypted servers of a context, from `open` to `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._context, self._clients = context, clients
        self._keys = read_directory(clients)
        self._looked_at = time.monotonic()
        self._handler: ThreadAuthenticator | None = None
        self._told: set[bytes] = set()
        self._wrong: list[str] = []
        """What was wrong with the directory's files when it was looked at last."""
        self.refused = 0
        """Clients that came with a key which is not in the directory."""

    def open(self) -> None:
        """Begin, before a server is bound."""
        from zmq.auth.thread import ThreadAuthenticator

        self._handler = ThreadAuthenticator(self._context)
        self._handler.start()
        self._handler.configure_curve_callback(DOMAIN, credentials_provider=self)

    def close(self) -> None:
        """End; those who are in stay in. May be called twice."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key is let in; asked by `zmq.auth`, on its thread."""
        del domain
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look_again()
        allowed = key in self._keys
        if not allowed:
            self.refused += 1
            self._tell(key)
        return allowed

    def _tell(self, key: bytes) -> None:
        """Say which key that was, for who has forgotten to put it there; it is public."""
        if key not in self._told and len(self._told) < KEYS_TOLD:
            self._told.add(key)
            _log.warning("key_refused", key=key.decode(errors="replace"), directory=str(self._clients))

    def _look_again(self) -> None:
        # Whoever cannot be read may have been taken off the list.
        try:
            self._keys, errors = sort_directory(self._clients)
        except KeyFileError as error:
            self._keys, errors = frozenset(), [error]
        wrong = [str(error) for error in errors]
        for reason in wrong:
            if reason not in self._wrong:
                _log.error("allow_list_unreadable", reason=reason)
        self._wrong = wrong
