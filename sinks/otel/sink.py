"""``otel://HOST:4318`` sends a span for each request to an OpenTelemetry collector, by OTLP over HTTP.

``otel:`` alone goes where OpenTelemetry's own environment variables say (``OTEL_EXPORTER_OTLP_ENDPOINT``), which also
name certificates, and headers for who asks for a login. With ``tls=1`` it is HTTPS. With ``request_ids=1`` spans have
the ids that the engine gives requests. What spans hold stands in `sinks.otel.spans` and docs/monitoring.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from events.types import EventBatch
from sinks.base import SinkContext, SinkError, SinkURL, SinkURLError
from sinks.otel.spans import RequestSpans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

PORT = 4318
"""Where the URL names a host only."""
SEND_SECONDS = 1.0
SEND_SPANS = 512
"""Ended spans are sent after so long, or when there are so many."""
MAX_HELD = 8192
"""Of spans that nobody takes, the last ones are kept."""
_PATH = "/v1/traces"
_TIMEOUT_SECONDS = 2.0
"""How long a collector may take to answer."""


class OtelOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    tls: bool = False
    request_ids: bool = False


class OtelSink:
    """Makes spans of batches, and sends those that have ended: only its runner's thread waits for the collector."""

    needs_cache = True
    needs_tokens = False

    def __init__(
        self, make_exporter: Callable[[], SpanExporter], model: str, *, with_ids: bool = False
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

        ended: list[ReadableSpan] = []

        class Keep(SpanProcessor):
            """Keeps what has ended."""

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
        """Make the exporter. It connects when the first spans have ended, and tells then whether anybody is there."""
        self._exporter = self._make_exporter()

    def write(self, batch: EventBatch) -> None:
        """Take one batch."""
        self._spans.fold(batch)

    def tick(self) -> None:
        """Send what has ended, now and then. Raises SinkError if nobody takes it; it is kept then, and sent later."""
        now = time.monotonic()
        if self._ended and (len(self._ended) >= SEND_SPANS or now - self._sent_at >= SEND_SECONDS):
            self._sent_at = now
            self._send()

    def close(self) -> None:
        """End the spans of what runs, as incomplete, and send what is left. Raises SinkError as `tick` does."""
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
                raise SinkError(f"nobody takes spans: {len(self._ended)} wait")
            del self._ended[: len(sent)]


def create(url: SinkURL, context: SinkContext) -> OtelSink:
    """The sink for an ``otel:`` URL."""
    options = url.read_options(OtelOptions)
    url.refuse_login("headers with a login stand in the variable OTEL_EXPORTER_OTLP_HEADERS: leave it out")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SinkURLError(str(url), "it needs OpenTelemetry: pip install 'kvcache[otel]'") from None
    if url.host is None and (url.path or url.options.get("tls")):
        raise SinkURLError(str(url), "it has no host: use otel://HOST:4318, or otel: alone")
    host = f"[{url.host}]" if url.host is not None and ":" in url.host else url.host
    path = url.path if url.path not in ("", "/") else _PATH
    scheme = "https" if options.tls else "http"
    endpoint = None if host is None else f"{scheme}://{host}:{url.port or PORT}{path}"
    return OtelSink(
        lambda: OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_SECONDS),
        context.model,
        with_ids=options.request_ids,
    )
