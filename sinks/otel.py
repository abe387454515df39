"""``otel://HOST:4318`` sends a span for each request to an OpenTelemetry collector, by OTLP over HTTP.

``otel:`` alone uses OpenTelemetry's own environment variables (``OTEL_EXPORTER_OTLP_ENDPOINT``), which also name
certificates, and headers for collectors that require a login. With ``tls=1`` it is HTTPS. With ``request_ids=1`` spans
have the ids, sessions and labels that the engine gives requests.

Times are the batches'. Spans (docs/how-to/monitoring.md) hold counts, levels and the sequence's handle, by which it is
found in a log; no tokens, names of blocks and salts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from events import types as ev
from events.packed import SLOT_BYTES
from events.structs import LEVEL_NAMES
from events.types import EventBatch, MoveReason, RequestId
from sinks.base import Sink, SinkContext, SinkError, SinkURL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer


REMEMBERED_REFUSALS = 4096
_PREFIX = "kvcache."


@dataclass
class _RequestSpan:
    """A running sequence."""

    span: Span
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("blocks_allocated", "blocks_stored", "blocks_evicted"), 0)
    )
    """Blocks that it received and stored, and that were removed or offloaded to make room for it."""


class RequestSpans:
    """Makes spans with a tracer. `with_ids`: True to include the requests' ids, sessions and labels."""

    def __init__(self, tracer: Tracer, *, with_ids: bool = False) -> None:
        self._tracer, self._with_ids = tracer, with_ids
        self._running: dict[int, _RequestSpan] = {}
        self._refused: dict[RequestId, tuple[int, ev.AdmissionRefused]] = {}
        self._inputs: dict[int, int] = {}
        """Handles of encoder inputs, and of the sequences of their requests."""
        self._waiting: dict[int, int] = {}
        """The number of each copy that a sequence waits for, and its handle."""
        self._now = 0
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.CacheCreated: lambda event: self.end_all(),
            ev.Gap: lambda event: self.end_all(),
            ev.AdmissionRefused: self._refuse,
            ev.SequenceAdded: self._begin,
            ev.SequenceRemoved: self._end,
            ev.EncoderAdded: self._begin_input,
            ev.EncoderRemoved: lambda event: self._inputs.pop(event.handle, None),
            ev.BlocksAllocated: self._allocate,
            ev.BlocksStored: lambda event: self._count(event.handle, "blocks_stored", event.slots),
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: lambda event: self._count(event.handle, "blocks_evicted", event.slots),
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
        }

    def fold(self, batch: EventBatch) -> None:
        """Fold a batch."""
        self._now = batch.ts
        for event in batch.events:
            if (handler := self._handlers.get(type(event))) is not None:
                handler(event)

    def end_all(self) -> None:
        """End the running spans, as incomplete; also after lost batches, since ends may be among them."""
        for handle in list(self._running):
            self._close(handle, {"incomplete": True})
        self._inputs.clear()
        self._waiting.clear()

    # -- requests

    def _refuse(self, event: ev.AdmissionRefused) -> None:
        self._refused[event.request_id] = self._now, event
        if len(self._refused) > REMEMBERED_REFUSALS:
            del self._refused[next(iter(self._refused))]

    def _begin(self, event: ev.SequenceAdded) -> None:
        secondary = max(event.reused_secondary)
        said: dict[str, Any] = {
            "handle": event.handle,
            "windows": len(event.reused_primary),
            "prompt_tokens": event.num_tokens,
            "reused_tokens.primary": event.reused - event.reused_partial - secondary,
            "reused_tokens.secondary": secondary,
            "reused_tokens.partial": event.reused_partial,
        }
        if self._with_ids:
            said["request_id"] = event.request_id
            if event.session is not None:
                said["session"] = event.session
            said |= {f"label.{name}": value for name, value in (event.labels or {}).items()}
        request = _RequestSpan(
            self._tracer.start_span("kvcache.request", attributes=_named(said), start_time=self._now)
        )
        self._running[event.handle] = request
        if (refused := self._refused.pop(event.request_id, None)) is not None:
            since, why = refused
            needed = {"blocks_needed": list(why.needed), "blocks_available": list(why.available)}
            request.span.add_event("admission refused", _named(needed), since)

    def _begin_input(self, event: ev.EncoderAdded) -> None:
        """Count the input's blocks for its request."""
        self._inputs[event.handle] = event.sequence
        if (request := self._running.get(event.sequence)) is not None:
            request.span.set_attributes(_named({"encoder_tokens": event.num_tokens}))

    def _end(self, event: ev.SequenceRemoved) -> None:
        said = {"tokens": event.num_tokens, "computed_tokens": event.computed, "ended": str(event.why)}
        self._close(event.handle, said)

    def _close(self, handle: int, said: dict[str, Any]) -> None:
        request = self._running.pop(handle, None)
        if request is not None:
            request.span.set_attributes(_named({**request.counts, **said}))
            request.span.end(self._now)

    def _request(self, handle: int) -> _RequestSpan | None:
        return self._running.get(self._inputs.get(handle, handle))

    # -- blocks

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        handles = array("q", event.handles)
        for handle, blocks in zip(handles, array("I", event.counts) or [1] * len(handles), strict=True):
            self._add(handle, "blocks_allocated", blocks)

    def _fill(self, event: ev.BlocksFilled) -> None:
        for handle in array("q", event.handles):
            self._add(handle, "blocks_stored", 1)

    def _count(self, handle: int | None, name: str, slots: bytes) -> None:
        self._add(handle, name, len(slots) // SLOT_BYTES)

    def _add(self, handle: int | None, name: str, blocks: int) -> None:
        if handle is not None and (request := self._request(handle)) is not None:
            request.counts[name] += blocks

    def _move(self, event: ev.BlocksMoved) -> None:
        if event.why == MoveReason.OFFLOAD:
            self._count(event.handle, "blocks_evicted", event.from_slots)
        if event.handle is not None and event.why != MoveReason.RECOMPUTED:
            blocks = len(event.from_slots) // SLOT_BYTES
            self._note(event.handle, str(event.why), blocks=blocks, from_level=LEVEL_NAMES[event.from_level])
            if event.why == MoveReason.ONBOARD:
                self._waiting[event.transfer] = event.handle

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer in array("q", event.transfers):
            if (handle := self._waiting.pop(transfer, None)) is not None:
                self._note(handle, "onboard landed")

    def _fail(self, event: ev.TransferFailed) -> None:
        for handle in self._running:
            self._note(handle, "copies failed")
        self._waiting.clear()

    def _note(self, handle: int, name: str, **said: Any) -> None:
        if (request := self._request(handle)) is not None:
            request.span.add_event(name, _named(said), self._now)


def _named(said: dict[str, Any]) -> dict[str, Any]:
    return {f"{_PREFIX}{name}": value for name, value in said.items()}


PORT = 4318
"""Port if the URL names a host only."""
SEND_SECONDS = 1.0
SEND_SPANS = 512
"""Ended spans are sent after this many seconds, or at this number."""
MAX_HELD = 8192
"""Limit of unsent spans, of which the last ones are kept."""
_PATH = "/v1/traces"
_TIMEOUT_SECONDS = 2.0
"""Time limit of the collector's answer."""


class OtelOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    tls: bool = False
    request_ids: bool = False


class OtelSink(Sink):
    """Makes spans of batches, and sends ended ones: only its runner's thread waits for the collector."""

    needs_cache = True
    needs_tokens = False

    def __init__(
        self, make_exporter: Callable[[], SpanExporter], model: str, *, with_ids: bool = False
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

        ended: list[ReadableSpan] = []

        class Keep(SpanProcessor):
            """Keeps ended spans."""

            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        about: dict[str, Any] = {"service.name": "kvcache", **({"kvcache.model": model} if model else {})}
        provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        provider.add_span_processor(Keep())
        self._spans = RequestSpans(provider.get_tracer("kvcache"), with_ids=with_ids)
        self._ended, self._make_exporter = ended, make_exporter
        self._exporter: SpanExporter | None = None
        self._sent_at = 0.0

    def open(self) -> None:
        """Make the exporter. It connects when the first spans have ended, and reports only then if that fails."""
        self._exporter = self._make_exporter()

    def write(self, batch: EventBatch) -> None:
        """Take one batch."""
        self._spans.fold(batch)

    def tick(self) -> None:
        """Send ended spans, at intervals. Raises SinkError if that fails; they are kept then, and sent later."""
        now = time.monotonic()
        if self._ended and (len(self._ended) >= SEND_SPANS or now - self._sent_at >= SEND_SECONDS):
            self._sent_at = now
            self._send()

    def close(self) -> None:
        """End the running spans, as incomplete, and send all. Raises SinkError as `tick` does."""
        self._spans.end_all()
        assert self._exporter is not None
        try:
            self._send()
        finally:
            self._exporter.shutdown()

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self._exporter is not None
        while self._ended:
            sent = self._ended[:SEND_SPANS]
            if self._exporter.export(sent) is not SpanExportResult.SUCCESS:
                del self._ended[:-MAX_HELD]
                raise SinkError(f"spans are not collected: {len(self._ended)} are waiting")
            del self._ended[: len(sent)]


def create(url: SinkURL, context: SinkContext) -> OtelSink:
    """Create the sink for an ``otel:`` URL."""
    options = url.read_options(OtelOptions)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise url.error("OpenTelemetry is not installed: pip install 'kvcache[otel]'") from None
    if url.host is None and (url.path or url.options.get("tls")):
        raise url.error("a host is missing: use otel://HOST:4318, or otel: alone")
    host = f"[{url.host}]" if url.host is not None and ":" in url.host else url.host
    path = url.path if url.path not in ("", "/") else _PATH
    scheme = "https" if options.tls else "http"
    endpoint = None if host is None else f"{scheme}://{host}:{url.port or PORT}{path}"
    return OtelSink(
        lambda: OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_SECONDS),
        context.model,
        with_ids=options.request_ids,
    )
