"""What a host in an endpoint stands for: any address of this machine, this machine alone, or somewhere else."""

from __future__ import annotations

import ipaddress

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
