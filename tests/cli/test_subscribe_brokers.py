"""`kvcache subscribe` at a broker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import Kvcache
from tests.support.servers.fleet import FeedingWorker
from tests.support.servers.nats_server import NATSServer


@pytest.mark.needs("nats-server")
def test_workers_of_a_stream(kvcache: Kvcache, tmp_path: Path) -> None:
    """Lines tell which worker they are about, and the summary what each has; passwords are nowhere."""
    users = 'authorization { users = [ { user: kv, password: "secret-word" } ] }'
    with NATSServer(tmp_path, users) as server:
        url = server.url.replace("//", "//kv:secret-word@")
        with FeedingWorker(url, "a") as first, FeedingWorker(url, "b") as second:
            first.store(3)
            second.store(2)
            first.settle()
            second.settle()
            done = kvcache("subscribe", url, "--count", 4)
        assert done.code == 0
        assert {line.split("from=")[1].split()[0] for line in done.out.splitlines()} == {"a", "b"}
        assert f"subscribed to {server.url}/kvcache" in done.err
        assert re.search(r"a: \d+ batches, 2 events; 3 blocks on GPU", done.err)
        assert "secret-word" not in done.out + done.err


def test_broker_that_is_not_there(kvcache: Kvcache) -> None:
    """What ZeroMQ's options are for is refused; a scheme that is no broker is no address either."""
    done = kvcache("subscribe", "nats://127.0.0.1:1", "--replay", "tcp://127.0.0.1:5558")
    assert (done.code, done.out) == (2, "")
    assert "--replay is only valid for ZeroMQ publishers" in done.err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nats://example.org", "prompts and passwords would leave this machine unencrypted"),
        ("nats://u:hidden@127.0.0.1/a.b", "the path must name the stream"),
        ("nats://u:hidden@127.0.0.1?speed=1", "unknown option 'speed'; known options: password_file, tls"),
        ("nats://u:hidden@127.0.0.1:port", "not a valid address"),
        ("nats://u:12/hidden@127.0.0.1", "write / in a password as %2F"),
        ("rediss://u:hidden@127.0.0.1/s?x=1", "an endpoint has no user or password"),
        ("NATS://u:hid/hidden@127.0.0.1/s", "an endpoint has no user or password"),
        ("nats://127.0.0.1?cafile=x", "require tls=true"),
        ("nats://127.0.0.1?worker=a.b", "letters, digits, _ and - only"),
        ("nats://u:hidden@127.0.0.1?password_file=x", "give the password either in the address or"),
    ],
)
def test_bad_address(kvcache: Kvcache, url: str, why: str) -> None:
    """It is said what is wrong with an address, without its password."""
    done = kvcache("subscribe", url)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert "hidden" not in done.err
