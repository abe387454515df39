"""``prometheus://HOST:PORT`` serves a cache's metrics over HTTP, for Prometheus to fetch.

``prometheus://:9090`` listens on all addresses, ``prometheus://127.0.0.1:9090`` only to its own machine. With
``?certfile=…&keyfile=…`` it speaks HTTPS, with ``&client_cafile=…`` to those only who have a certificate of that
authority. Metrics hold no tokens, no names of blocks and no request ids; their names are in docs/monitoring.md.
"""

from __future__ import annotations

import threading

import msgspec

from events.types import EventBatch
from sinks.base import Probe, SinkContext, SinkError, SinkURL, SinkURLError
from sinks.prometheus.blocks import BlockMetrics
from sinks.prometheus.collector import Collector
from sinks.prometheus.server import MetricsServer, tls_context

PORT = 9090
"""Where the URL names none."""


class PrometheusOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    certfile: str | None = None
    keyfile: str | None = None
    client_cafile: str | None = None


class PrometheusSink:
    """Counts what batches say, and serves that to whoever asks."""

    folds = True
    needs_cache = True
    """Its counters are those since the engine began, also where it is not in the engine's process."""
    needs_tokens = False

    def __init__(self, host: str, port: int, options: PrometheusOptions, model: str) -> None:
        self._host, self._port, self._options = host, port, options
        self._blocks = BlockMetrics()
        self.collector = Collector(self._blocks, model)
        self._server: MetricsServer | None = None
        self._thread: threading.Thread | None = None

    def watch(self, probe: Probe) -> None:
        """Serve also what events do not say: gauges, step times, log and sinks, as far as the probe knows."""
        self.collector.probe = probe

    @property
    def port(self) -> int:
        """Where it listens while it is open: the URL's, or any free one for port 0."""
        return self._server.server_port if self._server is not None else self._port

    def open(self) -> None:
        """Listen. Raises SinkError if the address cannot be had, or the certificates cannot be read."""
        from prometheus_client import make_wsgi_app
        from prometheus_client.registry import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self.collector)
        options = self._options
        try:
            tls = None
            if options.certfile is not None:
                tls = tls_context(options.certfile, options.keyfile, options.client_cafile)
        except OSError as error:
            raise SinkError(f"the certificates cannot be used: {error.strerror or error}") from None
        try:
            self._server = MetricsServer(self._host, self._port, tls)
        except OSError as error:
            where = f"{self._host}:{self._port}" if self._host else f"port {self._port} of all addresses"
            raise SinkError(f"cannot listen on {where}: {error.strerror or error}") from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve, name="kvcache-metrics", daemon=True)
        self._thread.start()

    def write(self, batch: EventBatch) -> None:
        """Count one batch."""
        self._blocks.fold(batch)
        self.collector.last_batch_ns = batch.ts

    def close(self) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(1.0)


def create(url: SinkURL, context: SinkContext) -> PrometheusSink:
    """The sink for a ``prometheus:`` URL."""
    options = url.read_options(PrometheusOptions)
    url.refuse_login()
    if url.path not in ("", "/"):
        raise SinkURLError(str(url), "metrics are at /metrics: give host and port only")
    if (options.certfile is None) != (options.keyfile is None):
        raise SinkURLError(str(url), "certfile and keyfile belong together")
    if options.client_cafile is not None and options.certfile is None:
        raise SinkURLError(str(url), "client_cafile asks for certfile and keyfile as well")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise SinkURLError(
            str(url), "it needs prometheus-client: pip install 'kvcache[prometheus]'"
        ) from None
    return PrometheusSink(url.host or "", PORT if url.port is None else url.port, options, context.model)
