"""vLLM's --kv-events-config, as a sink."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, urlsplit

import pytest

from sinks import KVEventsConfigError, kv_events_sink, open_sink
from sinks.router.feed import RouterFeed
from sinks.router.publisher import SocketPlace
from sinks.router.zmq import ZMQSettings
from tests.support.feeds.workers import CONTEXT

DEFAULTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10000,
    "hwm": 100000,
    "max_queue_size": 100000,
    "topic": "",
}
"""Everything that vLLM knows."""


def settings(config: object, rank: int = 0, options: str = "insecure=1") -> ZMQSettings:
    url = kv_events_sink(json.dumps(config), rank=rank, options=options)
    assert url is not None
    sink = open_sink(url, CONTEXT)
    assert isinstance(sink, RouterFeed)
    return sink.transport.settings  # type: ignore[attr-defined]


def test_the_defaults_are_vllms() -> None:
    """Only enabled, it says the same as with every field written out: all interfaces, empty topic, no replay."""
    short = kv_events_sink({"enable_kv_cache_events": True})
    assert short == kv_events_sink(DEFAULTS)
    found = settings(DEFAULTS)
    assert (found.place, found.replay) == (SocketPlace("*", 5557), None)
    assert (found.topic, found.hwm, found.writer.rank) == ("", 100000, 0)


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("tcp://*:5557", ("*", 5559, False)),
        ("tcp://[::]:5557", ("::", 5559, False)),
        ("tcp://[::1]:5557", ("::1", 5559, False)),
        ("tcp://router.ns.svc:5557", ("router.ns.svc", 5559, True)),
        ("tcp://127.0.0.1:5557", ("127.0.0.1", 5559, True)),
        ("tcp://0.0.0.0:5557", None),
        ("tcp://*:0", ("*", 0, False)),
    ],
)
def test_binding_connecting_and_ports_are_vllms(endpoint: str, place: tuple[str, int, bool] | None) -> None:
    """With * or :: it binds, else it connects; the rank is added to both ports, but to none that is to be found."""
    config = DEFAULTS | {"endpoint": endpoint, "replay_endpoint": "tcp://*:6000", "topic": "kv@pod@m"}
    if place is None:
        with pytest.raises(ValueError, match="router's host and port are required"):
            settings(config, rank=2)
        return
    found = settings(config, rank=2)
    assert found.place == SocketPlace(*place)
    assert (found.replay, found.writer.rank, found.topic) == (SocketPlace("*", 6002), 2, "kv@pod@m")


@pytest.mark.parametrize("config", [{}, {"enable_kv_cache_events": False}, DEFAULTS | {"publisher": "null"}])
def test_what_publishes_nothing_is_no_sink(config: dict[str, object]) -> None:
    """As in vLLM: not enabled, or by the publisher that is none."""
    assert kv_events_sink(config) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            DEFAULTS | {"format": "x"},
            "unknown field `format`; known fields: enable_kv_cache_events, .*topic$",
        ),
        (DEFAULTS | {"publisher": "kafka"}, "publisher must be zmq or null"),
        (DEFAULTS | {"hwm": "many"}, r"Expected `int`, got `str` - at `\$.hwm`; known fields"),
        (DEFAULTS | {"hwm": 0}, r"Expected `int` >= 1 - at `\$.hwm`"),
        (DEFAULTS | {"buffer_steps": -1}, r"Expected `int` >= 0 - at `\$.buffer_steps`"),
        (DEFAULTS | {"endpoint": "ipc:///x"}, "endpoint: ipc:// is not supported; write tcp://HOST:PORT"),
        (DEFAULTS | {"endpoint": "tcp://*"}, "endpoint: host and port are missing"),
        (DEFAULTS | {"endpoint": "tcp://me:hidden@h:1"}, "endpoint: host and port are missing"),
        (DEFAULTS | {"replay_endpoint": "x"}, "replay_endpoint: host and port are missing"),
        ([1], "Expected `object`, got `array`; known fields"),
    ],
)
def test_what_cannot_be_meant_is_refused(config: object, reason: str) -> None:
    """Each error names the field, the known ones where it helps, and repeats no password."""
    with pytest.raises(KVEventsConfigError, match=reason) as caught:
        kv_events_sink(json.dumps(config))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not json", '{"a"}'])
def test_what_is_no_json_is_refused(text: str) -> None:
    """With an example of what is."""
    with pytest.raises(KVEventsConfigError, match="not JSON"):
        kv_events_sink(text)


def test_it_is_refused_in_clear_beyond_this_machine() -> None:
    """As any URL; its default is bound to all interfaces."""
    with pytest.raises(ValueError, match="insecure=1"):
        settings(DEFAULTS, options="")


def test_topics_are_quoted() -> None:
    """Whatever stands in a topic stays in it."""
    topic = "kv@10.0.0.1:8000@org/m&rank=9#?"
    url = kv_events_sink(DEFAULTS | {"topic": topic})
    assert url is not None
    assert dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))["topic"] == topic
