"""A span for each request: what it says beside two other readings of random logs, and how it gets to a collector."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from events.codec import to_json
from events.ids import Handle
from events.log import LogReader
from events.types import CacheCreated, EventBatch, Gap, Namespace, SequenceAdded, SequenceRemoved
from kvcache.audit import open_log
from kvcache.errors import CapacityError
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.publish.publisher import Publisher
from sinks import open_sink
from sinks.base import SinkContext, SinkError, SinkURLError
from sinks.otel import MAX_HELD, OtelSink
from tests.support.feeds.scraping import cache, serve_some
from tests.support.feeds.sinks import RecordingSink
from tests.support.logs.random_logs import random_log
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

CONTEXT = SinkContext(32, 4, "llama")
SEEDS = seeds(range(10), quick=3)


class Kept(InMemorySpanExporter):
    """Keeps what it gets, also when it is shut down."""

    def spans(self) -> list[ReadableSpan]:
        return list(self.get_finished_spans())


def spans_of(batches: list[EventBatch], *, with_ids: bool = True) -> list[ReadableSpan]:
    kept = Kept()
    sink = OtelSink(lambda: kept, "llama", with_ids=with_ids)
    sink.open()
    for batch in batches:
        sink.write(batch)
        sink.tick()
    sink.close()
    return kept.spans()


def said(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return {name.removeprefix("kvcache."): value for name, value in span.attributes.items()}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The random log of a seed."""
    return cached(lambda seed: random_log(seed, tmp_path_factory.mktemp("random") / "log"))


@pytest.mark.parametrize("seed", SEEDS)
def test_spans_are_the_requests_of_the_log(seed: int, log: Callable[[int], Path]) -> None:
    """Who ran from when to when, with how many tokens, of which how many reused: as `kvcache.audit` reads the log."""
    batches = list(LogReader(log(seed)))
    breaks = [b.seq for b in batches if any(isinstance(event, CacheCreated | Gap) for event in b.events)]
    rows, unbroken = {}, set()
    for row in open_log(log(seed)).requests():
        if row.ended_seq is not None and row.admitted_seq is not None:
            key = row.request_id, row.admitted_ts
            rows[key] = row.ended_ts, row.prompt_tokens, row.reused_tokens, row.output_tokens
            if not any(row.admitted_seq < seq <= row.ended_seq for seq in breaks):
                unbroken.add(key)
    found = {}
    for span in spans_of(batches):
        fields = said(span)
        if "incomplete" in fields:
            continue
        reused = sum(fields[f"reused_tokens.{level}"] for level in ("primary", "secondary", "partial"))
        found[fields["request_id"], span.start_time] = (
            span.end_time,
            fields["prompt_tokens"],
            reused,
            fields["tokens"] - fields["prompt_tokens"],
        )
    assert len(unbroken) > 10
    assert unbroken <= found.keys()
    # In a batch with a gap, the audit knows nothing of what was before it.
    cut = {batch.ts for batch in batches if any(isinstance(event, Gap) for event in batch.events)}
    assert {key: each for key, each in found.items() if each[0] not in cut}.items() <= rows.items()


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_are_those_of_the_events(seed: int, log: Callable[[int], Path]) -> None:
    """Counted once more, from the events as JSON."""
    batches = list(LogReader(log(seed)))
    naive: Counter[tuple[int, str]] = Counter()
    events: Counter[tuple[int, str]] = Counter()
    onboards: dict[int, int] = {}
    for event in (event for batch in batches for event in json.loads(to_json(batch, 32))["events"]):
        kind, why, handle = event["type"], event.get("why"), event.get("handle")
        if kind == "BlocksAllocated":
            for one, count in zip(
                event["handles"], event["counts"] or [1] * len(event["handles"]), strict=True
            ):
                naive[one, "blocks_allocated"] += count
        elif kind == "BlocksStored":
            naive[handle, "blocks_stored"] += len(event["slots"])
        elif kind == "BlocksFilled":
            naive.update((one, "blocks_stored") for one in event["handles"])
        elif kind == "BlocksRemoved" or (kind == "BlocksMoved" and why == "offload"):
            naive[handle, "blocks_evicted"] += len(event.get("slots", event.get("from_slots")))
        if kind == "BlocksMoved" and why in ("offload", "onboard") and handle is not None:
            events[handle, why] += 1
            if why == "onboard":
                onboards[event["transfer"]] = handle
        elif kind == "SequenceRemoved":
            onboards = {transfer: one for transfer, one in onboards.items() if one != handle}
        elif kind == "TransferLanded":
            events.update(
                (onboards[each], "onboard landed") for each in event["transfers"] if each in onboards
            )
    whole = [span for span in spans_of(batches) if "incomplete" not in said(span)]
    for span in whole:
        fields, handle = said(span), said(span)["handle"]
        for name in ("blocks_allocated", "blocks_stored", "blocks_evicted"):
            assert fields[name] == naive[handle, name], name
        for name in ("offload", "onboard", "onboard landed"):
            assert sum(event.name == name for event in span.events) == events[handle, name], name


@pytest.mark.long
def test_random_logs_have_all_kinds_of_events(log: Callable[[int], Path]) -> None:
    """The comparisons above are not of nothing."""
    names: Counter[str] = Counter()
    for seed in range(10):
        for span in spans_of(list(LogReader(log(seed)))):
            names.update(event.name for event in span.events)
            names["incomplete"] += "incomplete" in said(span)
            names["stored"] += said(span)["blocks_stored"]
    assert min(names[name] for name in ("stored", "offload", "onboard", "onboard landed")) > 3
    assert names["copies failed"] > 0
    assert names["incomplete"] > 0


def test_refusals_are_reported_when_the_request_is_admitted() -> None:
    """With the time at which it was refused first, and what it would have needed then."""
    kept = Kept()
    clock = iter(range(10**18, 10**19, 10**9))
    sink = OtelSink(lambda: kept, "")
    with KVCacheManager(cache(), sinks=[sink], substitutes=Substitutes(wall_ns=clock.__next__)) as manager:
        manager.add_sequence("long", [1] * 14)
        for _ in range(3):
            with pytest.raises(CapacityError):
                manager.add_sequence("waits", [2] * 9)
            manager.flush()
        manager.remove_sequence("long")
        manager.add_sequence("waits", [2] * 9)
        manager.flush()
        manager.remove_sequence("waits", why="preempted")
        manager.flush()
    long, waits = kept.spans()
    [refused] = waits.events
    assert waits.start_time is not None
    assert long.start_time is not None
    assert long.events == ()
    assert (refused.name, refused.timestamp) == ("admission refused", long.start_time)
    assert waits.start_time > refused.timestamp
    assert dict(refused.attributes or {}) == {"kvcache.blocks_needed": (5,), "kvcache.blocks_available": (1,)}
    assert said(waits)["ended"] == "preempted"


class Collector:
    """OTLP over HTTP, as small as it can be: what it decodes is kept. It can be told to refuse, or to hang."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.refuses = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.gate.wait(WAIT)
                refuses = outer.refuses
                # Before the answer: after it the next request may come, and be kept first.
                if not refuses and self.path == "/v1/traces":
                    request = ExportTraceServiceRequest()
                    request.ParseFromString(body)
                    outer.requests.append(request)
                self.send_response(400 if refuses else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nobody wants to know."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"otel://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait(self, count: int) -> list[Any]:
        wait_until(lambda: len(self.spans) >= count, lambda: f"only {len(self.spans)} spans have come")
        return self.spans


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value for each in span.attributes}


def test_a_collector_gets_them() -> None:
    """A manager's spans over HTTP, decoded with the protocol's own classes: times, attributes, resource."""
    with collecting() as collector:
        before = time.time_ns()
        with KVCacheManager(cache(), sinks=[f"{collector.url}?request_ids=1"]) as manager:
            serve_some(manager, 12)
        spans = collector.wait(12)
    assert [attributes(span)["kvcache.request_id"].int_value for span in spans] == list(range(12))
    assert all(
        before < span.start_time_unix_nano <= span.end_time_unix_nano < time.time_ns() for span in spans
    )
    assert {attributes(span)["kvcache.prompt_tokens"].int_value for span in spans} == {7}
    assert len({span.trace_id for span in spans}) == 12
    assert {span.name for span in spans} == {"kvcache.request"}
    about = {
        each.key: each.value.string_value
        for each in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert (about["service.name"], about["kvcache.model"]) == ("kvcache", "llama")


@pytest.mark.parametrize("with_ids", [False, True])
def test_sessions_and_labels_go_with_ids(with_ids: bool) -> None:
    """What they may tell is for the engine to know."""
    added = SequenceAdded(
        Handle(1), "r", Namespace(), 1, b"", 0, (0,), (0,), 0, session="s", labels={"tenant": "t"}
    )
    ended = SequenceRemoved(Handle(1), (0,), (b"",), 1, 0)
    (span,) = spans_of([EventBatch(0, 1, (added, ended))], with_ids=with_ids)
    there = {name for name in said(span) if name in ("request_id", "session") or name.startswith("label")}
    assert there == ({"request_id", "session", "label.tenant"} if with_ids else set())
    if with_ids:
        assert (said(span)["session"], said(span)["label.tenant"]) == ("s", "t")


def test_a_collector_gets_them_from_a_sidecar(tmp_path: Path) -> None:
    """The same spans from the log, in a process that may be another one."""
    with KVCacheManager(cache(), log=tmp_path / "log") as manager:
        serve_some(manager, 12)
    with collecting() as collector:
        Publisher(tmp_path / "log", [collector.url], until="end").run()
        assert len(collector.wait(12)) == 12


def test_spans_report_no_tokens_salts_or_ids() -> None:
    """Ids only where they are asked for; the rest never."""
    with collecting() as collector:
        with KVCacheManager(cache(), sinks=[collector.url]) as manager:
            manager.add_sequence(
                "secret-request", [1_234_567] * 9, cache_salt="secret-salt", lora_name="secret-lora"
            )
            manager.store_context_blocks("secret-request", 9)
            manager.remove_sequence("secret-request")
        collector.wait(1)
        text = str(collector.requests)
    assert "kvcache.prompt_tokens" in text
    assert "secret" not in text
    assert "1234567" not in text


def test_what_is_refused_is_sent_later() -> None:
    """The sink fails meanwhile, as its stats say, and nothing is lost."""
    with collecting() as collector:
        collector.refuses = True
        with KVCacheManager(cache(), sinks=[collector.url]) as manager:
            serve_some(manager, 5)
            wait_until(lambda: manager.sink_stats()[0].errors)
            assert "spans are not collected" in str(manager.sink_stats()[0].last_error)
            assert collector.spans == []
            collector.refuses = False
            assert len(collector.wait(5)) == 5


def test_a_collector_that_hangs_holds_up_no_engine() -> None:
    """While a request to it hangs, the manager goes on; the batches wait in the sink's queue."""
    with collecting() as collector:
        collector.gate.clear()
        with KVCacheManager(cache(), sinks=[collector.url]) as manager:
            serve_some(manager, 3)
            wait_until(lambda: collector.asked)
            for first in range(100, 400, 3):
                manager.add_sequence(first, [1, 2, 3])
                manager.flush()
                manager.remove_sequence(first)
                manager.flush()
            assert manager.sink_stats()[0].lag_batches > 50
            collector.gate.set()
            collector.wait(103)


def test_what_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans are kept."""

    class Refusing(Kept):
        refuses = True

        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE if self.refuses else super().export(spans)

    monkeypatch.setattr("sinks.otel.MAX_HELD", 5)
    assert MAX_HELD > 512
    batches = RecordingSink()
    with KVCacheManager(cache(), sinks=[batches]) as manager:
        serve_some(manager, 20)
    exporter = Refusing()
    sink = OtelSink(lambda: exporter, "", with_ids=True)
    sink.open()
    for batch in batches.stream:
        sink.write(batch)
    with pytest.raises(SinkError, match="5 are waiting"):
        sink.tick()
    exporter.refuses = False
    sink.close()
    assert [said(span)["request_id"] for span in exporter.spans()] == [15, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("otel:///v1/traces", "a host is missing"),
        ("otel://c:4318?interval=3", "known options: tls, request_ids"),
        ("otel://user:secret@c:4318", "this sink has no authentication"),
    ],
)
def test_urls_that_say_something_else_are_refused(url: str, reason: str) -> None:
    """With what to do instead."""
    with pytest.raises(SinkURLError, match=reason) as caught:
        open_sink(url, CONTEXT)
    assert "secret" not in str(caught.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SinkURLError, match=r"kvcache\[otel\]"):
        open_sink("otel://c", CONTEXT)
