"""``prometheus://HOST:PORT`` serves a cache's metrics over HTTP, for Prometheus to fetch.

``prometheus://:9090`` listens on all addresses, ``prometheus://127.0.0.1:9090`` only on its own machine. With
``?certfile=…&keyfile=…`` it serves HTTPS, with ``&client_cafile=…`` only with clients that have a certificate of that
authority. With ``?label=tenant`` requests are also counted by that label: the first 20 values, or `label_values` of
them, and all others together. Metrics hold no tokens, no names of blocks and no request ids; their names are in
docs/how-to/monitoring.md.

`BlockMetrics` folds the events, with two times per slot: when its block was stored and last used. After lost batches,
or an exported state, those are unknown, and such blocks are counted without their ages. The `MetricsCollector` names
the metrics. Unlike `prometheus_client`'s own, the server limits slow and hostile peers: a connection has ten seconds in
all, TLS included, and there are at most 32; one more ends the oldest one.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
import numpy as np
import numpy.typing as npt

from events import types as ev
from events.packed import SLOT_BYTES
from events.structs import LEVEL_NAMES
from events.types import PRIMARY, EventBatch, MoveReason
from sinks.base import Probe, Sink, SinkContext, SinkError, SinkURL
from sinks.histogram import SECONDS, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


Slots = npt.NDArray[np.int32]
_UNKNOWN = 0


class _SlotTimes(NamedTuple):
    """Times at which the blocks of one window and level were stored and last used, in ns; 0 if unknown."""

    stored: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]


OTHERS = "other"
"""Label value that stands for all values after the first ones."""
_LONGEST_VALUE = 256


class LabelCounts(NamedTuple):
    """Counters of the requests with one value of a label."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


class LabelMetrics:
    """Counts requests by one label, with at most `values` values of their own: the first ones.

    So no counter ever goes down, and the number of series is bounded, whatever values clients use.
    """

    def __init__(self, label: str, values: int) -> None:
        self.label, self._values = label, values
        self.counts: dict[str, LabelCounts] = {}
        """Counters by value, empty for requests without one."""

    def admit(self, event: ev.SequenceAdded) -> None:
        """Count a request."""
        value = (event.labels or {}).get(self.label, "")[:_LONGEST_VALUE]
        if value and value not in self.counts and len(self.counts.keys() - {"", OTHERS}) >= self._values:
            value = OTHERS
        requests, prompt_tokens, reused_tokens = self.counts.get(value, LabelCounts())
        self.counts[value] = LabelCounts(
            requests + 1, prompt_tokens + event.num_tokens, reused_tokens + event.reused
        )


class BlockMetrics:
    """Counters and ages; written by the sink's thread, read by any."""

    def __init__(self, by_label: LabelMetrics | None = None) -> None:
        self.by_label = by_label
        self.counts = dict.fromkeys(_COUNTED, 0)
        """Counters without labels, by the names of their metrics."""
        self.reused_tokens: Counter[str] = Counter()
        """Tokens by level, or ``partial``."""
        self.removed: Counter[tuple[str, str]] = Counter()
        """Blocks by level and reason."""
        self.moved: Counter[str] = Counter()
        """Blocks by direction: ``offload``, ``onboard``."""
        self.moved_bytes: Counter[str] = Counter()
        self.idle_before_evict = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.lifetime = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.reuse_gap = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.copy_seconds = {name: Histogram(SECONDS) for name in ("offload", "onboard")}
        self.now = 0
        """Time of the last batch."""
        self._times: list[list[_SlotTimes]] = []
        self._block_bytes: list[int] = []
        self._transfers: dict[int, tuple[str, int]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CacheCreated: self._create,
            ev.StateExported: lambda event: self._forget(),
            ev.Gap: self._lose,
            ev.SequenceAdded: self._admit,
            ev.SequenceRemoved: lambda event: self._count("requests_finished", 1),
            ev.AdmissionRefused: lambda event: self._count("requests_refused", 1),
            ev.BlocksAllocated: lambda event: self._count("blocks_allocated", len(event.slots) // SLOT_BYTES),
            ev.BlocksCopied: lambda event: self._count("blocks_copied", 1),
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._store,
            ev.BlocksReused: self._reuse,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: self._remove,
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
            ev.CacheCleared: self._clear,
        }

    def fold(self, batch: ev.EventBatch) -> None:
        """Count one batch."""
        self.now = batch.ts
        for event in batch.events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)

    def _count(self, name: str, more: int) -> None:
        self.counts[name] += more

    # -- the cache

    def _create(self, event: ev.CacheCreated) -> None:
        self._times = [
            [_SlotTimes(*np.zeros((2, blocks), np.int64)) for blocks in group.num_blocks]
            for group in event.groups
        ]
        self._block_bytes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
        self._transfers.clear()

    def _lose(self, event: ev.Gap) -> None:
        self._count("metrics_lost_batches", event.last_seq - event.first_seq + 1)
        self._forget()

    def _forget(self) -> None:
        self._transfers.clear()
        for levels in self._times:
            for times in levels:
                times.stored[:] = times.used[:] = _UNKNOWN

    def _clear(self, event: ev.CacheCleared) -> None:
        for levels in event.removed:
            for level, blocks in zip(LEVEL_NAMES, levels, strict=True):
                self.removed[level, "cleared"] += blocks
        self._forget()

    # -- requests

    def _admit(self, event: ev.SequenceAdded) -> None:
        secondary = max(event.reused_secondary)
        self._count("requests", 1)
        self._count("prefix_cache_queries", event.num_tokens)
        # If windows differ, tokens that one of them has to onboard count as reused from secondary.
        self.reused_tokens["primary"] += event.reused - event.reused_partial - secondary
        self.reused_tokens["secondary"] += secondary
        self.reused_tokens["partial"] += event.reused_partial
        if self.by_label is not None:
            self.by_label.admit(event)

    # -- blocks

    def _store(self, event: ev.BlocksStored | ev.BlocksFilled) -> None:
        slots = np.frombuffer(event.slots, np.int32)
        self._count("blocks_stored", len(slots))
        times = self._times[event.group][PRIMARY]
        times.stored[slots] = times.used[slots] = self.now

    def _reuse(self, event: ev.BlocksReused) -> None:
        slots, times = np.frombuffer(event.slots, np.int32), self._times[event.group][event.level]
        if not event.replaced:  # else a block was computed twice, and nothing saved
            self._observe(self.reuse_gap[LEVEL_NAMES[event.level]], times.used[slots])
        times.used[slots] = np.where(times.used[slots] == _UNKNOWN, _UNKNOWN, self.now)

    def _move(self, event: ev.BlocksMoved) -> None:
        old, new = np.frombuffer(event.from_slots, np.int32), np.frombuffer(event.to_slots, np.int32)
        source = self._times[event.group][event.from_level]
        target = self._times[event.group][event.to_level]
        if event.why == MoveReason.OFFLOAD:
            self._observe(self.idle_before_evict["primary"], source.used[old])
        target.stored[new], target.used[new] = source.stored[old], source.used[old]
        source.stored[old] = source.used[old] = _UNKNOWN
        if event.why == MoveReason.RECOMPUTED:
            self._count("blocks_recomputed", len(new))
            return
        self.moved[event.why] += len(new)
        self.moved_bytes[event.why] += len(new) * self._block_bytes[event.group]
        self._transfers[event.transfer] = (str(event.why), self.now)

    def _remove(self, event: ev.BlocksRemoved) -> None:
        level, slots = LEVEL_NAMES[event.level], np.frombuffer(event.slots, np.int32)
        times = self._times[event.group][event.level]
        self.removed[level, str(event.why)] += len(slots)
        self._observe(self.idle_before_evict[level], times.used[slots])
        self._observe(self.lifetime[level], times.stored[slots])
        times.stored[slots] = times.used[slots] = _UNKNOWN

    def _observe(self, histogram: Histogram, since: npt.NDArray[np.int64]) -> None:
        known = since[since != _UNKNOWN]
        if len(known):
            histogram.observe(np.maximum(self.now - known, 0))

    # -- copies

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer in array("q", event.transfers):
            why, since = self._transfers.pop(transfer, ("", 0))
            if why:
                self.copy_seconds[why].observe(np.array([max(self.now - since, 0)], np.int64))

    def _fail(self, event: ev.TransferFailed) -> None:
        for transfer in array("q", event.transfers):
            self._transfers.pop(transfer, None)
            self._count("copies_failed", 1)


PREFIX = "kvcache_"
"""Prefix of all names."""
_COUNTED = {
    "requests": "Requests admitted.",
    "requests_finished": "Requests that ended, for any reason.",
    "requests_refused": "Requests refused for lack of blocks; each is counted once until it is admitted.",
    "prefix_cache_queries": "Prompt tokens of admitted requests, all of which were looked up in the cache.",
    "metrics_lost_batches": "Batches of events that were lost before they reached these metrics.",
    "blocks_allocated": "Blank slots allocated.",
    "blocks_stored": "Blocks that became reusable.",
    "blocks_copied": "Blocks copied because only their start matched a prompt.",
    "blocks_recomputed": "Blocks computed again although they were in secondary.",
    "copies_failed": "Block copies that failed.",
}
_COUNTERS = {
    **_COUNTED,
    "prefix_cache_hits": "Prompt tokens reused from the cache, by the level they were found in; partial: at the start "
    "of a block.",
    "requests_by_label": "Requests admitted, by one of their labels.",
    "prompt_tokens_by_label": "Prompt tokens of admitted requests, by one of their labels.",
    "reused_tokens_by_label": "Prompt tokens reused from the cache, by one of the labels of their requests.",
    "blocks_removed": "Blocks removed from the cache, by level and reason; capacity: evicted.",
    "blocks_moved": "Blocks moved between levels; offload: evicted from primary and kept in secondary.",
    "moved_bytes": "Bytes of the blocks moved between levels.",
    "prefix_cache_own_hits": "Reused tokens that a preempted request had computed itself before.",
    "blocks_deduplicated": "Blocks computed by two requests at the same time, one of which was returned.",
    "prompt_blocks": "Blocks of prompts by how much of them was cached: all (full), the start (partial), or "
    "nothing (missed).",
    "blocks_first_used": "Slots allocated for the first time.",
    "copied_bytes": "Bytes copied for partially matching blocks.",
    "events": "Events.",
    "batches": "Batches of events: engine steps that changed something.",
    "log_batches": "Batches written to the log's files; durable unless log.fsync is never.",
    "log_bytes": "Bytes written to the log's files.",
    "log_dropped_batches": "Batches that the log has dropped.",
    "sink_batches": "Batches accepted by a sink.",
    "sink_dropped_batches": "Batches that were dropped before they reached a sink.",
    "sink_errors": "Failures of a sink.",
    "sink_refused_peers": "Connections to a feed that were refused because of their keys.",
}
_GAUGES = {
    "last_batch_age_seconds": "Time since the last batch of events.",
    "blocks": "Slots by state: held by running requests, cached without a holder (reusable), or blank.",
    "usage_ratio": "Fraction of the slots held by running requests.",
    "requests_running": "Running requests.",
    "log_durable_batch": "Number of the last batch known to be on disk; -1: none.",
    "log_lag_batches": "Batches waiting to be written.",
    "log_up": "Whether the log is being written; 0 while the disk refuses it.",
    "sink_lag_batches": "Batches waiting for a sink.",
    "sink_up": "Whether a sink works; 0 while it fails or is quarantined.",
}
_HISTOGRAMS = {
    "block_idle_before_evict_seconds": "Time from the last use of a block to its eviction, by level.",
    "block_lifetime_seconds": "Time from storing a block to its removal, by the level it was removed from.",
    "block_reuse_gap_seconds": "Time from a block's last use to its reuse, by the level it was found in.",
    "copy_seconds": "Time from the decision to copy blocks to the step that detected the completed copy.",
    "step_seconds": "Time spent in calls of the manager per engine step, from one flush to the next.",
}

_Values = Iterator[tuple[Any, ...]]
"""Names of metrics, each with a value or, by those of the labels whose names follow, several."""


class MetricsCollector:
    """The collector by which prometheus-client reads the metrics of one cache."""

    def __init__(self, blocks: BlockMetrics, model: str) -> None:
        self._blocks, self._model = blocks, model
        self.probe: Probe | None = None
        """The probe of a manager, or of a fold of its log; None: metrics that need one are left out."""

    def collect(self) -> Iterator[Metric]:
        """Yield all current metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families: list[tuple[Any, dict[str, str]]] = [
            (CounterMetricFamily, _COUNTERS),
            (GaugeMetricFamily, _GAUGES),
            (HistogramMetricFamily, _HISTOGRAMS),
        ]
        for name, values, *labels in self._values():
            kind, texts = next(each for each in families if name in each[1])
            family = kind(PREFIX + name, texts[name], labels=["model", *labels])
            for key, value in (values if labels else {(): values}).items():
                row = [self._model, *((key,) if isinstance(key, str) else key)]
                numbers = value.cumulative() if isinstance(value, Histogram) else (value,)
                family.add_metric(row, *numbers)
            yield family

    def _values(self) -> _Values:
        yield from self._of_events(self._blocks)
        if self.probe is not None:
            yield from self._of_state(self.probe.stats())
            if self.probe.step_times is not None:
                yield "step_seconds", self.probe.step_times
            yield from self._of_log(self.probe.log_stats())
            yield from self._of_sinks(self.probe.sink_stats())

    def _of_events(self, blocks: BlockMetrics) -> _Values:
        yield from blocks.counts.items()
        hits = {level: blocks.reused_tokens[level] for level in (*LEVEL_NAMES, "partial")}
        yield "prefix_cache_hits", hits, "level"
        if (by_label := blocks.by_label) is not None:
            counts = by_label.counts.copy()
            for at, name in enumerate(LabelCounts._fields):
                values = {(by_label.label, value): each[at] for value, each in counts.items()}
                yield f"{name}_by_label", values, "label", "value"
        yield "blocks_removed", dict(sorted(blocks.removed.copy().items())), "level", "reason"
        ways = ("offload", "onboard")
        yield "blocks_moved", {way: blocks.moved[way] for way in ways}, "direction"
        yield "moved_bytes", {way: blocks.moved_bytes[way] for way in ways}, "direction"
        yield "block_idle_before_evict_seconds", blocks.idle_before_evict, "level"
        yield "block_lifetime_seconds", blocks.lifetime, "level"
        yield "block_reuse_gap_seconds", blocks.reuse_gap, "level"
        yield "copy_seconds", blocks.copy_seconds, "direction"
        if blocks.now:
            yield "last_batch_age_seconds", max(0.0, time.time() - blocks.now / 1e9)

    def _of_state(self, stats: Any) -> _Values:
        slots: dict[tuple[str, str], int] = {}
        usage: dict[str, float] = {}
        for level, total, blank, idle in zip(
            LEVEL_NAMES, stats.blocks_total, stats.blocks_blank, stats.blocks_unreferenced, strict=True
        ):
            held = total - blank - idle
            slots |= {(level, "held"): held, (level, "reusable"): idle, (level, "blank"): blank}
            usage |= {level: held / total} if total else {}
        yield "blocks", slots, "level", "state"
        yield "usage_ratio", usage, "level"
        yield "requests_running", stats.sequences
        yield "prefix_cache_own_hits", stats.reused_tokens_own
        yield "blocks_deduplicated", stats.blocks_deduplicated
        looked_up = {
            "full": stats.blocks_reused_full,
            "partial": stats.blocks_reused_partial,
            "missed": stats.blocks_missed,
        }
        yield "prompt_blocks", looked_up, "cached"
        yield "blocks_first_used", stats.blocks_allocated_new
        yield "copied_bytes", stats.bytes_copied
        yield "events", stats.events
        yield "batches", stats.batches

    def _of_log(self, log: Any) -> _Values:
        if log is None:
            return
        yield "log_batches", log.batches
        yield "log_bytes", log.bytes
        yield "log_dropped_batches", log.dropped_batches
        # A process that only reads the log has no counters of its writer's queue.
        if log.durable_seq is not None:
            yield "log_durable_batch", float(log.durable_seq)
        if log.lag_batches is not None:
            yield "log_lag_batches", log.lag_batches
        if log.state is not None:
            yield "log_up", float(log.state == "running")

    def _of_sinks(self, sinks: Any) -> _Values:
        for name in ("batches", "dropped_batches", "errors", "refused_peers", "lag_batches"):
            yield f"sink_{name}", {each.name: getattr(each, name) for each in sinks}, "sink"
        yield "sink_up", {each.name: float(each.state == "running") for each in sinks}, "sink"


MAX_CONNECTIONS = 32
MAX_SECONDS = 10.0
"""Maximum lifetime of a connection in seconds."""
_LOOK_SECONDS = 0.5
"""Interval of the check for connections that are too old; stopping the server takes as long."""
_PAUSE_SECONDS = 0.1
"""Pause after a connection that could not be accepted: without it, accepting would be retried in a busy loop while no
file can be opened."""


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base's name
        """Log no requests."""


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens on `host` ("": all addresses) at `port` (0: any free one), from its construction on. Raises OSError.

    With `tls` it serves HTTPS only.
    """

    daemon_threads = True
    request_queue_size = 128
    """Connections waiting to be accepted; further ones are delayed by the system for a second."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._since: dict[socket.socket, float] = {}
        """Start time of each connection, oldest first."""
        self._lock = threading.Lock()
        address = host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104  as the URL says
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        super().__init__((address, port), _SilentHandler)
        if tls is not None:
            # The handshake is left to the connection's own thread.
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def server_bind(self) -> None:
        """Bind without resolving the host's name as HTTPServer does."""
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Errors, as when no file can be opened, are ignored."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, on a thread of its own; above the limit, close the oldest connection."""
        with self._lock:
            if len(self._since) >= MAX_CONNECTIONS:
                oldest = next(iter(self._since))
                del self._since[oldest]
                _hang_up(oldest)
            self._since[request] = time.monotonic()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._since.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that are too old."""
        now = time.monotonic()
        with self._lock:
            for connection, since in self._since.items():
                if now - since > MAX_SECONDS:
                    _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: any peer could fill the log."""


def tls_context(certfile: str, keyfile: str | None, client_cafile: str | None) -> ssl.SSLContext:
    """Return the TLS context; with `client_cafile` for clients with that authority's certificates. Raises OSError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certfile, keyfile)
    if client_cafile is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_cafile)
    return context


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        # TLS has no more messages.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


PORT = 9090
"""Port if the URL has none."""


class PrometheusOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    certfile: str | None = None
    keyfile: str | None = None
    client_cafile: str | None = None
    label: str | None = None
    label_values: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20


class PrometheusSink(Sink):
    """Counts batches, and serves the counters over HTTP."""

    folds = True
    watches = True
    needs_cache = True
    """Counters cover the time since the engine started, in `kvcache publish` too."""
    needs_tokens = False

    def __init__(self, host: str, port: int, options: PrometheusOptions, model: str) -> None:
        self._host, self._port, self._options = host, port, options
        by_label = None if options.label is None else LabelMetrics(options.label, options.label_values)
        self._blocks = BlockMetrics(by_label)
        self.collector = MetricsCollector(self._blocks, model)
        self._server: MetricsServer | None = None

    def watch(self, probe: Probe) -> None:
        """Also serve metrics that events do not have: gauges, step times, log and sinks, if the probe has them."""
        self.collector.probe = probe

    @property
    def port(self) -> int:
        """The port while open: the URL's, or the one found for port 0."""
        return self._server.server_port if self._server is not None else self._port

    def open(self) -> None:
        """Listen. Raises SinkError if the address is not available, or the certificates cannot be read."""
        from prometheus_client import make_wsgi_app
        from prometheus_client.registry import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self.collector)
        options, tls = self._options, None
        try:
            if options.certfile is not None:
                tls = tls_context(options.certfile, options.keyfile, options.client_cafile)
        except OSError as error:
            raise SinkError(f"the certificates cannot be used: {error.strerror or error}") from None
        try:
            self._server = MetricsServer(self._host, self._port, tls)
        except OSError as error:
            where = f"{self._host}:{self._port}" if self._host else f"port {self._port} on all addresses"
            raise SinkError(f"cannot listen on {where}: {error.strerror or error}") from None
        self._server.set_app(make_wsgi_app(registry))
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_LOOK_SECONDS,), name="kvcache-metrics", daemon=True).start()

    def write(self, batch: EventBatch) -> None:
        """Count one batch."""
        self._blocks.fold(batch)

    def close(self) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def create(url: SinkURL, context: SinkContext) -> PrometheusSink:
    """Create the sink for a ``prometheus:`` URL."""
    options = url.read_options(PrometheusOptions)
    if url.path not in ("", "/"):
        raise url.error("metrics are served at /metrics: give only host and port")
    if (options.certfile is None) != (options.keyfile is None):
        raise url.error("certfile and keyfile must be given together")
    if options.client_cafile is not None and options.certfile is None:
        raise url.error("client_cafile requires certfile and keyfile")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise url.error("prometheus-client is not installed: pip install 'kvcache[prometheus]'") from None
    return PrometheusSink(url.host or "", PORT if url.port is None else url.port, options, context.model)
