"""Addresses of publishers, as ZeroMQ writes them: ``tcp://HOST:PORT`` or ``ipc://PATH``.

ZeroMQ connects in the background, and retries for ever even hopeless addresses. So addresses are checked before.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv6Address

from events.errors import EventsError, without_login
from events.subscribe.sockets import is_wildcard

_PORT = re.compile(r"[0-9]{1,5}")
_NUMBERS = re.compile(r"[0-9.]+")
_BRACKETED = re.compile(r"\[(.*)\]")


@dataclass(eq=False, repr=False)
class EndpointError(EventsError):
    """The endpoint can never be connected to."""

    endpoint: str
    reason: str
    text = "{endpoint}: {reason}; write tcp://HOST:PORT or ipc://PATH"

    def __post_init__(self) -> None:
        if not self.endpoint.startswith("ipc:"):
            self.endpoint = without_login(self.endpoint)
        super().__post_init__()


@dataclass(eq=False, repr=False)
class InsecureEndpoint(EventsError):
    """Other machines could connect to the bound endpoint, and publish false events."""

    endpoint: str
    text = (
        "{endpoint}: any machine that can reach it could impersonate a worker: give keys "
        "(`kvcache docs settings`), or declare the network trusted (--insecure, insecure=True)"
    )


def host_of(endpoint: str, *, binds: bool = False) -> str | None:
    """Return the host of an endpoint to connect to; None for a transport without one. A name is not looked up.

    If it `binds`, that may be ``*``, with a port that may be 0. Raises EndpointError for an impossible address. Paths
    are ZeroMQ's to refuse.
    """
    refuse_foreign(endpoint)
    transport, _, address = endpoint.partition("://")
    if transport == "ipc":
        return None
    # Before a semicolon is an address of this machine.
    host, colon, port = address.rpartition(";")[2].rpartition(":")
    if not colon:
        raise EndpointError(endpoint, "it has no port")
    if not _PORT.fullmatch(port) or not (0 if binds else 1) <= int(port) < 1 << 16:
        raise EndpointError(endpoint, "its port must be from 1 to 65535")
    if binds and host == "*":
        return host
    if host in ("", "*"):
        raise EndpointError(endpoint, "it has no host")
    return _checked_host(endpoint, host)


def refuse_foreign(endpoint: str) -> None:
    """Raise EndpointError for text that is no address of a socket, without a password in it."""
    transport = endpoint.partition("://")[0]
    if transport == "ipc":
        return
    if "@" in endpoint:
        raise EndpointError(endpoint, "an endpoint has no user or password")
    if transport == "inproc":
        raise EndpointError(endpoint, "inproc addresses cannot be reached from another process")
    if transport != "tcp":
        raise EndpointError(endpoint, "only tcp:// and ipc:// are supported")


def should_bind(endpoint: str) -> bool:
    """Return True if it stands for any address of this machine, to which others connect."""
    host = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
    return endpoint.startswith("tcp://") and is_wildcard(host)


def _checked_host(endpoint: str, host: str) -> str:
    bracketed = _BRACKETED.fullmatch(host)
    try:
        if bracketed or ":" in host:
            host = bracketed[1] if bracketed else host
            IPv6Address(host)
        elif _NUMBERS.fullmatch(host):
            socket.inet_aton(host)
    except (OSError, ValueError):
        raise EndpointError(endpoint, f"{host} is not an IP address") from None
    return host
