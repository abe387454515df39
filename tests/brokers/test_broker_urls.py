"""URLs of brokers' sinks, and what is said where a client's package is missing."""

from __future__ import annotations

import sys

import pytest

from events.brokers.address import BrokerError
from events.brokers.subscriber import BrokerSubscriber
from sinks import SinkURLError, open_sink
from tests.support.servers.fleet import CONTEXT

SCHEMES = ("nats", "redis", "kafka")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("u:hidden@example.org", "prompts and passwords would leave this machine unencrypted"),
        ("u:hidden@example.org?tls=1&insecure=1", "insecure= has no effect"),
        ("u:hidden@127.0.0.1/a/b", "the path must name the stream"),
        ("u:hidden@127.0.0.1?worker=a.b", "letters, digits, _ and - only"),
        ("u:hidden@127.0.0.1?certfile=a", "certfile and keyfile must be given together"),
        ("u:hidden@127.0.0.1?password_file=a", "give the password either in the address or"),
        ("u:hidden@127.0.0.1?rank=-1", "bad option"),
        ("u:hidden@127.0.0.1?timeout=5", "needs a number and one of the units"),
        ("u:hidden@127.0.0.1?format=json", "format must be one of vllm, vllm-array, sglang"),
        ("u:hidden@127.0.0.1?speed=1", "unknown option 'speed'"),
    ],
)
def test_bad_urls(scheme: str, rest: str, why: str) -> None:
    """What is wrong with a URL is said, without its password."""
    with pytest.raises(SinkURLError, match=why) as caught:
        open_sink(f"{scheme}://{rest}", CONTEXT)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["nats", "redis"])
def test_a_state_must_not_be_forgotten_before_the_next(scheme: str) -> None:
    """Messages must be kept for three times as long as it takes until the state is told again."""
    with pytest.raises(SinkURLError, match="retain must be at least 3 times restate"):
        open_sink(f"{scheme}://127.0.0.1?restate=10min&retain=20min", CONTEXT)


@pytest.mark.parametrize(
    ("scheme", "package"), [("nats", "nats"), ("redis", "redis"), ("kafka", "confluent_kafka")]
)
def test_missing_package(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    """Sink and reader name the extra that brings the client."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SinkURLError, match=rf"pip install 'kvcache\[{scheme}\]'"):
        open_sink(f"{scheme}://127.0.0.1", CONTEXT)
    with pytest.raises(BrokerError, match=rf"pip install 'kvcache\[{scheme}\]'"):
        BrokerSubscriber(f"{scheme}://127.0.0.1")
