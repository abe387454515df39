"""Cache salts: told to routers only where a URL asks for it, and never in events, logs or reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from events.tokens.names import salt_digest
from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.replay import replay
from sinks import base
from sinks.base import MAX_SALT_BYTES, PlainSalts
from sinks.router.zmq import ZMQTransport
from tests.support.waiting import WAIT

SECRET = "tenant-4711-secret"
PROMPT = list(range(1, 14))


def config(**settings: Any) -> KVCacheConfig:
    return KVCacheConfig(max_sequence_length=64, tokens_per_block=4, primary_blocks=64, **settings)


def compute(manager: KVCacheManager, request_id: str, salt: str | None) -> None:
    """A prompt of three full blocks, and one that decoding fills."""
    manager.add_sequences([Request(request_id, PROMPT, cache_salt=salt)])
    manager.store_context_blocks(request_id, len(PROMPT))
    for token in range(4):
        manager.add_tokens([request_id], [token])
    manager.flush()


def stores(
    options: str, use: Callable[[KVCacheManager], None], manager: Callable[..., KVCacheManager] | None = None
) -> list[dict[str, Any]]:
    """The stores that a router gets of what `use` does with a manager."""
    url = f"zmq+pub://127.0.0.1:0?heartbeat=0&coalesce=0{options}"
    made = manager(sinks=[url]) if manager else KVCacheManager(config(), sinks=[url])
    context: zmq.Context[Any] = zmq.Context()
    events: list[dict[str, Any]] = []
    with context, context.socket(zmq.SUB) as socket, made as cache:
        transport = cache.feeds[0].transport
        assert isinstance(transport, ZMQTransport)
        socket.subscribe(b"")
        socket.connect(transport.endpoint)
        assert cache.wait_subscribers(1, WAIT)
        use(cache)
        cache.clear()  # so that the last event is known
        while not events or not any(event["type"] == "BlockStored" for event in events):
            events += _received(socket)
        while events[-1]["type"] != "AllBlocksCleared":
            events += _received(socket)
        socket.close(linger=0)
    return [event for event in events if event["type"] == "BlockStored"]


def _received(socket: zmq.Socket[Any]) -> list[dict[str, Any]]:
    assert socket.poll(int(WAIT * 1000)), "nothing came"
    found: list[dict[str, Any]] = msgspec.msgpack.decode(socket.recv_multipart()[2])[1]
    return found


@pytest.mark.parametrize(
    ("options", "reported"),
    [("", salt_digest(SECRET).hex()), ("&salts=digest", salt_digest(SECRET).hex()), ("&salts=plain", SECRET)],
)
def test_routers_are_reported_what_the_url_asks_for(options: str, reported: str) -> None:
    """The field and the root's key hold the digest, or with salts=plain the salt; decoded blocks have it as well."""

    def use(manager: KVCacheManager) -> None:
        compute(manager, "salted", SECRET)
        compute(manager, "plain", None)

    found = stores(options, use)
    salted = [event for event in found if "cache_salt" in event]
    assert [len(event["block_hashes"]) for event in salted] == [3, 1]
    assert {event["cache_salt"] for event in salted} == {reported}
    assert salted[0]["extra_keys"] == [[reported], None, None]
    assert [len(event["block_hashes"]) for event in found if "cache_salt" not in event] == [3, 1]


def test_the_salt_is_in_no_event_and_no_report(tmp_path: Path) -> None:
    """Log, file sink, reports, settings and texts of objects hold the digest at most, whatever the feed tells."""
    sinks = ["zmq+pub://127.0.0.1:0?salts=plain", f"file://{tmp_path}/events.jsonl?tokens=1"]
    with capture_logs() as reports, KVCacheManager(config(), log=tmp_path / "log", sinks=sinks) as manager:
        compute(manager, "r", SECRET)
        texts = [repr(vars(manager)), repr(manager.sink_stats()), repr(manager.stats())]
    assert SECRET not in f"{reports} {texts}"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 3
    assert [data for data in written if SECRET.encode() in data] == []


def test_a_salt_that_was_not_received_goes_out_as_its_digest(tmp_path: Path) -> None:
    """After `resume` blocks are told by digest until a request brings the salt; then new blocks have it."""
    with KVCacheManager(config(), log=tmp_path) as manager:
        compute(manager, "before", SECRET)
    state = replay(tmp_path).state

    def use(manager: KVCacheManager) -> None:
        manager.add_sequence("after", [99, *PROMPT], cache_salt=SECRET)
        manager.store_context_blocks("after", len(PROMPT) + 1)
        manager.flush()

    def resumed(**options: Any) -> KVCacheManager:
        return KVCacheManager.resume(state, **options)

    reported = [event["cache_salt"] for event in stores("&salts=plain", use, resumed)]
    assert reported[-1] == SECRET
    assert set(reported[:-1]) <= {salt_digest(SECRET).hex(), SECRET}


class TestPlainSalts:
    """What is kept in memory."""

    def test_nothing_unless_a_sink_asks(self) -> None:
        """A manager whose sinks want no salts keeps none."""
        for options, kept in (("", 0), ("?salts=plain", 1)):
            with KVCacheManager(config(), sinks=[f"zmq+pub://127.0.0.1:0{options}"]) as manager:
                compute(manager, "r", SECRET)
                assert len(manager._salts._known) == kept

    def test_those_used_last_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """When there are too many, the one goes that was used longest ago."""
        monkeypatch.setattr(base, "MAX_SALTS", 2)
        known = PlainSalts()
        find = known.ask()
        known.remember(["a", None, "b", "a", "c"])
        assert [find(salt_digest(salt)) for salt in "abc"] == ["a", None, "c"]

    def test_long_ones_are_not_kept(self) -> None:
        """A salt that batches have no room for is told by its digest."""
        known = PlainSalts()
        find = known.ask()
        fits, too_long = "é" * (MAX_SALT_BYTES // 2), "é" * (MAX_SALT_BYTES // 2) + "x"
        known.remember([fits, too_long])
        assert (find(salt_digest(fits)), find(salt_digest(too_long))) == (fits, None)
