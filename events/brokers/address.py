"""The address and login of a broker: ``nats://user:password@host:4222/STREAM?tls=true&cafile=ca.pem``.

Writers (`sinks.brokers`) and readers (`events.brokers.subscriber`) use the same address. A password is in the address
or, better, in a file (``password_file=``); no text of an error has it. Payloads hold token ids, which are the prompts:
data that leaves this machine is encrypted, unless ``insecure=true`` states that the network itself is protected.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from events.errors import EventsError, option_name, shortened, system_reason, without_login
from events.subscribe.sockets import is_loopback

PORTS = {"nats": 4222, "redis": 6379, "kafka": 9092}
"""The schemes of brokers, and the default port of each."""
STREAM = "kvcache"
"""Default name of the stream, the topic or the keys."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""Pattern of names of workers and streams: no broker gives any of these characters a meaning."""
_MOST_PASSWORD_BYTES = 4096
REFUSED = "wrong user or password, or no permission"


@dataclass(eq=False, repr=False)
class BrokerError(EventsError):
    """The broker cannot be used as configured; `broker` is its address without user, password and options."""

    broker: str
    reason: str
    text = "{broker}: {reason}"


class BrokerUnavailable(BrokerError):
    """The broker does not answer, or cannot now: the same may succeed later."""


class BrokerURLError(BrokerError, ValueError):
    """The address, or an option in it, cannot be understood."""


class AccessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the login and the worker."""

    password_file: str | None = None
    tls: bool = False
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    insecure: bool = False
    worker: str | None = None
    """The worker to write as, or the only one to read."""


_PLAIN = AccessOptions()


@dataclass(frozen=True)
class BrokerAddress:
    """A broker, and a stream in it. Raises BrokerURLError if the parts do not fit together."""

    scheme: str
    host: str
    port: int
    stream: str = STREAM
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    access: AccessOptions = _PLAIN

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.stream):
            reason = "the path must name the stream, with letters, digits, _ and - only, as in /kvcache"
            raise BrokerURLError(str(self), reason)
        if (self.access.certfile is None) != (self.access.keyfile is None):
            raise BrokerURLError(str(self), "certfile and keyfile must be given together")
        if not self.access.tls and (self.access.cafile or self.access.certfile):
            raise BrokerURLError(str(self), "cafile, certfile and keyfile require tls=true")
        if self.access.password_file is not None and self.password is not None:
            raise BrokerURLError(
                str(self), "give the password either in the address or in password_file, not in both"
            )
        self._refuse_clear_text()

    def _refuse_clear_text(self) -> None:
        if self.access.tls and self.access.insecure:
            raise BrokerURLError(str(self), "with tls=true, insecure= has no effect: omit it")
        if not self.access.tls and not self.access.insecure and not is_loopback(self.host):
            reason = (
                "prompts and passwords would leave this machine unencrypted: add tls=true, or insecure=true "
                "if the network is trusted"
            )
            raise BrokerURLError(str(self), reason)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return without_login(f"{self.scheme}://{host}:{self.port}/{self.stream}")

    @property
    def secret(self) -> str | None:
        """Return the password; its file is read each time, so that a new one counts. Raises BrokerError."""
        if self.access.password_file is None:
            return self.password
        try:
            with Path(self.access.password_file).open("rb") as file:
                return file.read(_MOST_PASSWORD_BYTES).decode().strip()
        except (OSError, ValueError) as error:
            reason = system_reason(error, "it is not text")
            raise BrokerError(str(self), f"password_file cannot be read: {reason}") from None

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the connection; None without tls. Raises BrokerError."""
        access = self.access
        if not access.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=access.cafile)
            if access.certfile is not None:
                context.load_cert_chain(access.certfile, access.keyfile)
        except (OSError, ValueError) as error:
            reason = system_reason(error, "they are not PEM files")
            raise BrokerError(str(self), f"the TLS files cannot be used: {reason}") from None
        return context


def is_broker(url: str) -> bool:
    """Return True if an address to read from is a broker's."""
    return url.partition("://")[0] in PORTS


def parse(url: str) -> BrokerAddress:
    """Parse an address to read from. Raises BrokerURLError."""
    try:
        parts = urlsplit(url)
        port = parts.port
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        # Python's message may quote the password.
        raise BrokerURLError(url.partition(":")[0], "not a valid address") from None
    if parts.scheme not in PORTS:
        raise BrokerURLError(url.partition(":")[0], f"not a broker; brokers are {', '.join(PORTS)}")
    if "@" in parts.path:
        # An apparent host and port may be a user and half a password.
        raise BrokerURLError(parts.scheme, "write / in a password as %2F, or use password_file=")
    known = [each.encode_name for each in msgspec.structs.fields(AccessOptions)]
    bare = without_login(f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
    unknown = [name for name, _ in pairs if name not in known]
    if unknown:
        raise BrokerURLError(
            bare, f"unknown option {option_name(unknown[0])}; known options: {', '.join(known)}"
        )
    try:
        options = msgspec.convert(dict(pairs), AccessOptions, strict=False)
    except msgspec.ValidationError as error:
        raise BrokerURLError(bare, f"bad option: {shortened(str(error))}") from None
    return BrokerAddress(
        parts.scheme,
        parts.hostname or "127.0.0.1",
        port or PORTS[parts.scheme],
        unquote(parts.path).strip("/") or STREAM,
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        options,
    )


def require_client(address: BrokerAddress, package: str) -> None:
    """Raise BrokerError if the client's package is not installed."""
    try:
        import_module(package)
    except ImportError:
        reason = f"the client is not installed: pip install 'kvcache[{address.scheme}]'"
        raise BrokerError(str(address), reason) from None
