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
from events.types import PRIMARY, SECONDARY, EventBatch, MoveReason
from sinks.base import Probe, Sink, SinkContext, SinkError, SinkURL, SinkURLError
from sinks.histogram import SECONDS, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


Slots = npt.NDArray[np.int32]
_UNKNOWN = 0


class _SlotTimes:
    """Times at which the blocks of one window and level were stored and last used, in ns; 0 if unknown."""

    def __init__(self, size: int) -> None:
        self.stored, self.used = np.zeros(size, np.int64), np.zeros(size, np.int64)


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
        self.prompt_tokens = self.requests = self.refused = self.finished = self.lost_batches = 0
        self.reused_tokens: Counter[str] = Counter()
        """Tokens by level, or ``partial``."""
        self.stored = self.allocated = self.copied = self.recomputed = 0
        self.removed: Counter[tuple[str, str]] = Counter()
        """Blocks by level and reason."""
        self.moved: Counter[str] = Counter()
        """Blocks by direction: ``offload``, ``onboard``."""
        self.moved_bytes: Counter[str] = Counter()
        self.failed_copies = 0
        self.idle_before_evict = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.lifetime = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.reuse_gap = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.copy_seconds = {name: Histogram(SECONDS) for name in ("offload", "onboard")}
        self.now = 0
        """Time of the last batch."""
        self._times: list[tuple[_SlotTimes, _SlotTimes]] = []
        self._block_bytes: list[int] = []
        self._transfers: dict[int, tuple[str, int]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CacheCreated: self._create,
            ev.StateExported: lambda event: self._forget(),
            ev.Gap: self._lose,
            ev.SequenceAdded: self._admit,
            ev.SequenceRemoved: self._finish,
            ev.AdmissionRefused: self._refuse,
            ev.BlocksAllocated: self._allocate,
            ev.BlocksCopied: self._copy,
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

    # -- the cache

    def _create(self, event: ev.CacheCreated) -> None:
        self._times = [
            (_SlotTimes(group.num_blocks[PRIMARY]), _SlotTimes(group.num_blocks[SECONDARY]))
            for group in event.groups
        ]
        self._block_bytes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
        self._transfers.clear()

    def _lose(self, event: ev.Gap) -> None:
        self.lost_batches += event.last_seq - event.first_seq + 1
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
        self.requests += 1
        self.prompt_tokens += event.num_tokens
        # If windows differ, tokens that one of them has to onboard count as reused from secondary.
        self.reused_tokens["primary"] += event.reused - event.reused_partial - secondary
        self.reused_tokens["secondary"] += secondary
        self.reused_tokens["partial"] += event.reused_partial
        if self.by_label is not None:
            self.by_label.admit(event)

    def _finish(self, event: ev.SequenceRemoved) -> None:
        self.finished += 1

    def _refuse(self, event: ev.AdmissionRefused) -> None:
        self.refused += 1

    # -- blocks

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        self.allocated += len(event.slots) // SLOT_BYTES

    def _copy(self, event: ev.BlocksCopied) -> None:
        self.copied += 1

    def _store(self, event: ev.BlocksStored | ev.BlocksFilled) -> None:
        slots = np.frombuffer(event.slots, np.int32)
        self.stored += len(slots)
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
            self.recomputed += len(new)
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
            self.failed_copies += 1


PREFIX = "kvcache_"
"""Prefix of all names."""


class MetricsCollector:
    """The collector by which prometheus-client reads the metrics of one cache."""

    def __init__(self, blocks: BlockMetrics, model: str) -> None:
        self._blocks, self._model = blocks, model
        self.probe: Probe | None = None
        """The probe of a manager, or of a fold of its log; None: metrics that need one are left out."""

    def collect(self) -> Iterator[Metric]:
        """Yield all current metrics."""
        yield from self._of_requests()
        if self._blocks.by_label is not None:
            yield from self._of_labels(self._blocks.by_label)
        yield from self._of_blocks()
        yield from self._of_ages()
        if self._blocks.now:
            age = max(0.0, time.time() - self._blocks.now / 1e9)
            yield self._gauge("last_batch_age_seconds", "Time since the last batch of events.", age)
        if self.probe is not None:
            yield from self._of_state(self.probe.stats())
            if self.probe.step_times is not None:
                text = "Time spent in calls of the manager per engine step, from one flush to the next."
                yield self._histogram("step_seconds", text, self.probe.step_times)
            yield from self._of_log(self.probe.log_stats())
            yield from self._of_sinks(self.probe.sink_stats())

    # -- from events

    def _of_requests(self) -> Iterator[Metric]:
        blocks = self._blocks
        yield self._counter("requests", "Requests admitted.", blocks.requests)
        yield self._counter("requests_finished", "Requests that ended, for any reason.", blocks.finished)
        text = "Requests refused for lack of blocks; each is counted once until it is admitted."
        yield self._counter("requests_refused", text, blocks.refused)
        text = "Prompt tokens of admitted requests, all of which were looked up in the cache."
        yield self._counter("prefix_cache_queries", text, blocks.prompt_tokens)
        text = (
            "Prompt tokens reused from the cache, by the level they were found in; partial: at the start of "
            "a block."
        )
        hits = {level: blocks.reused_tokens[level] for level in (*LEVEL_NAMES, "partial")}
        yield self._counter("prefix_cache_hits", text, hits, "level")
        text = "Batches of events that were lost before they reached these metrics."
        yield self._counter("metrics_lost_batches", text, blocks.lost_batches)

    def _of_labels(self, by_label: LabelMetrics) -> Iterator[Metric]:
        counts = by_label.counts.copy()
        texts = (
            "Requests admitted, by one of their labels.",
            "Prompt tokens of admitted requests, by one of their labels.",
            "Prompt tokens reused from the cache, by one of the labels of their requests.",
        )
        for at, (name, text) in enumerate(zip(LabelCounts._fields, texts, strict=True)):
            values = {(by_label.label, value): each[at] for value, each in counts.items()}
            yield self._counter(f"{name}_by_label", text, values, "label", "value")

    def _of_blocks(self) -> Iterator[Metric]:
        blocks = self._blocks
        yield self._counter("blocks_allocated", "Blank slots allocated.", blocks.allocated)
        yield self._counter("blocks_stored", "Blocks that became reusable.", blocks.stored)
        yield self._counter(
            "blocks_copied", "Blocks copied because only their start matched a prompt.", blocks.copied
        )
        text = "Blocks computed again although they were in secondary."
        yield self._counter("blocks_recomputed", text, blocks.recomputed)
        text = "Blocks removed from the cache, by level and reason; capacity: evicted."
        removed = dict(sorted(blocks.removed.copy().items()))
        yield self._counter("blocks_removed", text, removed, "level", "reason")
        text = "Blocks moved between levels; offload: evicted from primary and kept in secondary."
        ways = ("offload", "onboard")
        yield self._counter("blocks_moved", text, {way: blocks.moved[way] for way in ways}, "direction")
        moved = {way: blocks.moved_bytes[way] for way in ways}
        yield self._counter("moved_bytes", "Bytes of the blocks moved between levels.", moved, "direction")
        yield self._counter("copies_failed", "Block copies that failed.", blocks.failed_copies)

    def _of_ages(self) -> Iterator[Metric]:
        blocks = self._blocks
        text = "Time from the last use of a block to its eviction, by level."
        yield self._histogram("block_idle_before_evict_seconds", text, blocks.idle_before_evict, "level")
        text = "Time from storing a block to its removal, by the level it was removed from."
        yield self._histogram("block_lifetime_seconds", text, blocks.lifetime, "level")
        text = "Time from a block's last use to its reuse, by the level it was found in."
        yield self._histogram("block_reuse_gap_seconds", text, blocks.reuse_gap, "level")
        text = "Time from the decision to copy blocks to the step that detected the completed copy."
        yield self._histogram("copy_seconds", text, blocks.copy_seconds, "direction")

    # -- from the process

    def _of_state(self, stats: Any) -> Iterator[Metric]:
        slots: dict[tuple[str, str], int] = {}
        usage: dict[str, float] = {}
        for level, total, blank, idle in zip(
            LEVEL_NAMES, stats.blocks_total, stats.blocks_blank, stats.blocks_unreferenced, strict=True
        ):
            held = total - blank - idle
            slots |= {(level, "held"): held, (level, "reusable"): idle, (level, "blank"): blank}
            usage |= {level: held / total} if total else {}
        text = "Slots by state: held by running requests, cached without a holder (reusable), or blank."
        yield self._gauge("blocks", text, slots, "level", "state")
        yield self._gauge("usage_ratio", "Fraction of the slots held by running requests.", usage, "level")
        yield self._gauge("requests_running", "Running requests.", stats.sequences)
        text = "Reused tokens that a preempted request had computed itself before."
        yield self._counter("prefix_cache_own_hits", text, stats.reused_tokens_own)
        text = "Blocks computed by two requests at the same time, one of which was returned."
        yield self._counter("blocks_deduplicated", text, stats.blocks_deduplicated)
        text = (
            "Blocks of prompts by how much of them was cached: all (full), the start (partial), or "
            "nothing (missed)."
        )
        looked_up = {
            "full": stats.blocks_reused_full,
            "partial": stats.blocks_reused_partial,
            "missed": stats.blocks_missed,
        }
        yield self._counter("prompt_blocks", text, looked_up, "cached")
        text = "Slots allocated for the first time."
        yield self._counter("blocks_first_used", text, stats.blocks_allocated_new)
        yield self._counter("copied_bytes", "Bytes copied for partially matching blocks.", stats.bytes_copied)
        yield self._counter("events", "Events.", stats.events)
        text = "Batches of events: engine steps that changed something."
        yield self._counter("batches", text, stats.batches)

    def _of_log(self, log: Any) -> Iterator[Metric]:
        if log is None:
            return
        # A process that only reads the log has no counters of its writer's queue.
        text = "Batches written to the log's files; durable unless log.fsync is never."
        yield self._counter("log_batches", text, log.batches)
        yield self._counter("log_bytes", "Bytes written to the log's files.", log.bytes)
        yield self._counter("log_dropped_batches", "Batches that the log has dropped.", log.dropped_batches)
        if log.durable_seq is not None:
            text = "Number of the last batch known to be on disk; -1: none."
            yield self._gauge("log_durable_batch", text, float(log.durable_seq))
        if log.lag_batches is not None:
            yield self._gauge("log_lag_batches", "Batches waiting to be written.", log.lag_batches)
        if log.state is not None:
            text = "Whether the log is being written; 0 while the disk refuses it."
            yield self._gauge("log_up", text, float(log.state == "running"))

    def _of_sinks(self, sinks: Any) -> Iterator[Metric]:
        for name, text, attribute in (
            ("sink_batches", "Batches accepted by a sink.", "batches"),
            (
                "sink_dropped_batches",
                "Batches that were dropped before they reached a sink.",
                "dropped_batches",
            ),
            ("sink_errors", "Failures of a sink.", "errors"),
            (
                "sink_refused_peers",
                "Connections to a feed that were refused because of their keys.",
                "refused_peers",
            ),
        ):
            yield self._counter(name, text, {each.name: getattr(each, attribute) for each in sinks}, "sink")
        lag = {each.name: each.lag_batches for each in sinks}
        yield self._gauge("sink_lag_batches", "Batches waiting for a sink.", lag, "sink")
        text = "Whether a sink works; 0 while it fails or is quarantined."
        yield self._gauge(
            "sink_up", text, {each.name: float(each.state == "running") for each in sinks}, "sink"
        )

    # -- families, with a value, or values by those of the labels

    def _counter(self, name: str, text: str, values: Any, *labels: str) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily, name, text, values, labels)

    def _gauge(self, name: str, text: str, values: Any, *labels: str) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily, name, text, values, labels)

    def _histogram(self, name: str, text: str, values: Any, *labels: str) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        return self._filled(HistogramMetricFamily, name, text, values, labels)

    def _filled(self, kind: Any, name: str, text: str, values: Any, labels: tuple[str, ...]) -> Metric:
        family: Metric = kind(PREFIX + name, text, labels=["model", *labels])
        for key, value in (values if labels else {(): values}).items():
            row = [self._model, *((key,) if isinstance(key, str) else key)]
            numbers = value.cumulative() if isinstance(value, Histogram) else (value,)
            family.add_metric(row, *numbers)  # type: ignore[attr-defined]
        return family


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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; above the limit, close the oldest connection."""
        with self._lock:
            if len(self._since) >= MAX_CONNECTIONS:
                oldest = next(iter(self._since))
                del self._since[oldest]
                _hang_up(oldest)
            self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer; on a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: Any) -> None:
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
        raise SinkURLError(str(url), "metrics are served at /metrics: give only host and port")
    if (options.certfile is None) != (options.keyfile is None):
        raise SinkURLError(str(url), "certfile and keyfile must be given together")
    if options.client_cafile is not None and options.certfile is None:
        raise SinkURLError(str(url), "client_cafile requires certfile and keyfile")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise SinkURLError(
            str(url), "prometheus-client is not installed: pip install 'kvcache[prometheus]'"
        ) from None
    return PrometheusSink(url.host or "", PORT if url.port is None else url.port, options, context.model)
