"""Addresses of publishers: which can be connected to, and which never."""

from __future__ import annotations

import pytest
import zmq

from events.subscribe.endpoints import EndpointError, host_of

CONNECTABLE = {
    "tcp://127.0.0.1:5557": "127.0.0.1",
    "tcp://127.1:1": "127.1",
    "tcp://10.0.0.1:65535": "10.0.0.1",
    "tcp://feed-0.workers.svc:5557": "feed-0.workers.svc",
    "tcp://4pods:5557": "4pods",
    "tcp://[::1]:5557": "::1",
    "tcp://::1:5557": "::1",
    "tcp://[fe80::1%lo]:5557": "fe80::1%lo",
    "tcp://127.0.0.1:0;127.0.0.1:5557": "127.0.0.1",
    "tcp://lo;host:5557": "host",
    "ipc:///tmp/feed": None,
    "ipc://@feed": None,
}


@pytest.mark.parametrize("endpoint", CONNECTABLE)
def test_the_host_is_found(endpoint: str) -> None:
    """Whatever ZeroMQ connects to is let through, and its host is known."""
    assert host_of(endpoint) == CONNECTABLE[endpoint]
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://host", "it has no port"),
        ("tcp://host:", "its port must be from 1 to 65535"),
        ("tcp://127.0.0.1:0", "its port"),
        ("tcp://127.0.0.1:65536", "its port"),
        ("tcp://127.0.0.1:99999", "its port"),
        ("tcp://127.0.0.1:" + "9" * 5000, "its port"),
        ("tcp://127.0.0.1:+80", "its port"),
        ("tcp://127.0.0.1:\u0665", "its port"),
        ("tcp://127.0.0.1:*", "its port"),
        ("tcp://127.0.0.1:5557/", "its port"),
        ("tcp://[::1]", "its port"),
        ("tcp://:5557", "it has no host"),
        ("tcp://*:5557", "it has no host"),
        ("tcp://127.0.0.1:5557;", "it has no port"),
        ("tcp://256.1.1.1:80", "256.1.1.1 is not an IP address"),
        ("tcp://1.2.3.4.5:80", "1.2.3.4.5 is not an IP address"),
        ("tcp://[::1:5557", "is not an IP address"),
        ("tcp://[host]:5557", "host is not an IP address"),
        ("tcp://a:b:80", "a:b is not an IP address"),
        ("inproc://feed", "inproc addresses cannot be reached"),
        ("nats://host:4222", "only tcp:// and ipc:// are supported; write tcp://"),
        ("host:5557", "only tcp:// and ipc:// are supported"),
    ],
)
def test_what_nobody_can_have_is_refused(endpoint: str, reason: str) -> None:
    """ZeroMQ would try most of these for ever."""
    with pytest.raises(EndpointError, match=reason):
        host_of(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://somebody:SECRET@127.0.0.1:5557",
        "rediss://somebody:SECRET@h/s",
        "NATS://somebody:SECRET@h:4222/s",
        "tls://somebody:SEC/SECRET@h",
        "tcp://somebody:SEC@SECRET@h:1",
        "nats:somebody:SECRET@h",
        "somebody:SECRET@h",
        "SECRET@h",
    ],
)
def test_passwords_are_not_repeated(endpoint: str) -> None:
    """An endpoint with a user is refused without what stands before the host, whatever its scheme."""
    with pytest.raises(EndpointError, match="an endpoint has no user or password") as reported:
        host_of(endpoint)
    assert "SEC" not in str(reported.value) + repr(reported.value)
