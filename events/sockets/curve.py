"""Keys for ZeroMQ's encryption (CURVE), from files in the format of `zmq.auth`.

Both ends have a key pair. Whoever *connects* is the client and knows the other's public key beforehand; whoever *binds*
is the server and has a list of the clients that it lets in (`events.sockets.gate`).

SECURITY: what is secret stays in `KeyPair.secret`, which no `repr`, message or log shows. A file with a secret that
others may read, or that a group may write, is refused: its secret is none.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from events.errors import EventsError, UnsafeFile
from events.files.safe import refuse_foreign

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
        require_curve()
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


def require_curve() -> None:
    """Raise CurveUnavailable where ZeroMQ was built without encryption."""
    if not zmq.has("curve"):
        raise CurveUnavailable


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
        raise KeyFileError(path, error.strerror or "it cannot be read") from None
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
        raise KeyFileError(path, getattr(error, "strerror", None) or "there is no such path") from None
