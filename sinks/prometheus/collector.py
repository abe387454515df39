"""The metrics, by name: read by the server's threads whenever somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from events.structs import LEVEL_NAMES
from sinks.histogram import Histogram
from sinks.prometheus.blocks import BlockMetrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from sinks.base import Probe

Rows = Sequence[tuple[dict[str, str], float]]
"""Values and their labels."""
PREFIX = "kvcache_"
"""Of all names."""


class Collector:
    """What prometheus-client asks for the metrics of one cache."""

    def __init__(self, blocks: BlockMetrics, model: str) -> None:
        self._blocks, self._labels = blocks, {"model": model}
        self.probe: Probe | None = None
        """Of a manager, or of a fold of its log; None: what only they know is left out."""
        self.last_batch_ns = 0
        """When the last batch was made."""

    def collect(self) -> Iterator[Metric]:
        """All metrics as of now."""
        yield from self._of_requests()
        yield from self._of_blocks()
        yield from self._of_ages()
        if self.last_batch_ns:
            age = max(0.0, time.time() - self.last_batch_ns / 1e9)
            yield self._gauge("last_batch_age_seconds", "Time since the last batch of events.", [({}, age)])
        if self.probe is not None:
            yield from self._of_state(self.probe.stats())
            yield from self._of_steps(self.probe)
            yield from self._of_log(self.probe.log_stats())
            yield from self._of_sinks(self.probe.sink_stats())

    # -- what events say

    def _of_requests(self) -> Iterator[Metric]:
        blocks = self._blocks
        yield self._counter("requests", "Requests admitted.", [({}, blocks.requests)])
        yield self._counter("requests_finished", "Requests that ended.", [({}, blocks.finished)])
        text = "Requests that did not fit; each is counted once until it is admitted."
        yield self._counter("requests_refused", text, [({}, blocks.refused)])
        text = "Prompt tokens of admitted requests: what was looked up."
        yield self._counter("prefix_cache_queries", text, [({}, blocks.prompt_tokens)])
        text = (
            "Prompt tokens that needed no computing, by where they were found; partial: in a part of a block."
        )
        levels = [({"level": level}, blocks.reused_tokens[level]) for level in (*LEVEL_NAMES, "partial")]
        yield self._counter("prefix_cache_hits", text, levels)
        text = "Batches of events that did not reach these metrics."
        yield self._counter("metrics_lost_batches", text, [({}, blocks.lost_batches)])

    def _of_blocks(self) -> Iterator[Metric]:
        blocks = self._blocks
        yield self._counter("blocks_allocated", "Blank slots taken.", [({}, blocks.allocated)])
        yield self._counter("blocks_stored", "Blocks that became reusable.", [({}, blocks.stored)])
        text = "Blocks copied because only a part of them was wanted."
        yield self._counter("blocks_copied", text, [({}, blocks.copied)])
        text = "Blocks that were computed again while they lay in secondary."
        yield self._counter("blocks_recomputed", text, [({}, blocks.recomputed)])
        text = "Blocks whose content is gone, by level and reason; capacity: evicted."
        removed = sorted(blocks.removed.copy().items())
        rows = [({"level": level, "reason": reason}, count) for (level, reason), count in removed]
        yield self._counter("blocks_removed", text, rows)
        text = "Blocks moved between the levels; offload: evicted from primary, kept in secondary."
        ways = ("offload", "onboard")
        yield self._counter("blocks_moved", text, [({"direction": way}, blocks.moved[way]) for way in ways])
        text = "Bytes of these blocks."
        moved = [({"direction": way}, blocks.moved_bytes[way]) for way in ways]
        yield self._counter("moved_bytes", text, moved)
        yield self._counter("copies_failed", "Copies of blocks that failed.", [({}, blocks.failed_copies)])

    def _of_ages(self) -> Iterator[Metric]:
        blocks = self._blocks
        text = "Time from a block's last use to its eviction from a level."
        yield self._histogram("block_idle_before_evict_seconds", text, "level", blocks.idle_before_evict)
        text = "Time from storing a block to its removal, by the level it was removed from."
        yield self._histogram("block_lifetime_seconds", text, "level", blocks.lifetime)
        text = "Time from a block's last use to its reuse, by the level it was found in."
        yield self._histogram("block_reuse_gap_seconds", text, "level", blocks.reuse_gap)
        text = "Time from the decision to copy blocks to the step that found the copy complete."
        yield self._histogram("copy_seconds", text, "direction", blocks.copy_seconds)

    # -- what the process knows

    def _of_state(self, stats: Any) -> Iterator[Metric]:
        rows: list[tuple[dict[str, str], float]] = []
        usage: list[tuple[dict[str, str], float]] = []
        for level, total, blank, idle in zip(
            LEVEL_NAMES, stats.blocks_total, stats.blocks_blank, stats.blocks_unreferenced, strict=True
        ):
            counts = {"held": total - blank - idle, "reusable": idle, "blank": blank}
            rows += [({"level": level, "state": state}, count) for state, count in counts.items()]
            usage += [({"level": level}, (total - blank - idle) / total)] if total else []
        text = (
            "Slots by what they are: held by running requests, cached and held by none (reusable), or blank."
        )
        yield self._gauge("blocks", text, rows)
        yield self._gauge("usage_ratio", "Share of the slots that running requests hold.", usage)
        yield self._gauge("requests_running", "Running requests.", [({}, stats.sequences)])
        text = "Hits that were a returning request's own tokens, computed before it was preempted."
        yield self._counter("prefix_cache_own_hits", text, [({}, stats.reused_tokens_own)])
        text = "Blocks computed by two requests at a time, of which one was given back."
        yield self._counter("blocks_deduplicated", text, [({}, stats.blocks_deduplicated)])
        text = "Blocks of prompts by what was cached of them: all (full), the start (partial), or nothing (missed)."
        kinds = ("full", "partial", "missed")
        looked_up = (stats.blocks_reused_full, stats.blocks_reused_partial, stats.blocks_missed)
        rows = [({"cached": kind}, count) for kind, count in zip(kinds, looked_up, strict=True)]
        yield self._counter("prompt_blocks", text, rows)
        text = "Slots that were taken for the first time."
        yield self._counter("blocks_first_used", text, [({}, stats.blocks_allocated_new)])
        text = "Bytes of the starts of blocks that were copied."
        yield self._counter("copied_bytes", text, [({}, stats.bytes_copied)])
        yield self._counter("events", "Events.", [({}, stats.events)])
        yield self._counter(
            "batches", "Batches of events: engine steps that changed something.", [({}, stats.batches)]
        )

    def _of_steps(self, probe: Probe) -> Iterator[Metric]:
        if probe.step_times is not None:
            text = "Time that the manager's calls take of an engine step, from one flush to the next."
            yield self._histogram("step_seconds", text, None, {"": probe.step_times})

    def _of_log(self, log: Any) -> Iterator[Metric]:
        if log is None:
            return
        # Who only reads the log does not know what its writer has before itself.
        text = "Batches in the log's files; durable, unless the log is set to fsync=never."
        yield self._counter("log_batches", text, [({}, log.batches)])
        yield self._counter("log_bytes", "Bytes in the log's files.", [({}, log.bytes)])
        yield self._counter(
            "log_dropped_batches", "Batches that the log has lost.", [({}, log.dropped_batches)]
        )
        if log.durable_seq is not None:
            text = "The last batch known to be on disk; -1: none."
            yield self._gauge("log_durable_batch", text, [({}, float(log.durable_seq))])
        if log.lag_batches is not None:
            yield self._gauge("log_lag_batches", "Batches that wait to be written.", [({}, log.lag_batches)])
        if log.state is not None:
            text = "Whether the log is written: 0 while the disk refuses."
            yield self._gauge("log_up", text, [({}, float(log.state == "running"))])

    def _of_sinks(self, sinks: Any) -> Iterator[Metric]:
        text = "Batches that a sink has taken."
        yield self._counter("sink_batches", text, [({"sink": each.name}, each.batches) for each in sinks])
        text = "Batches that did not reach a sink."
        rows = [({"sink": each.name}, each.dropped_batches) for each in sinks]
        yield self._counter("sink_dropped_batches", text, rows)
        rows = [({"sink": each.name}, each.errors) for each in sinks]
        yield self._counter("sink_errors", "Times that a sink has failed.", rows)
        text = "Connections to a feed that came to nothing because of keys."
        rows = [({"sink": each.name}, each.refused_peers) for each in sinks]
        yield self._counter("sink_refused_peers", text, rows)
        text = "Batches that wait for a sink."
        yield self._gauge(
            "sink_lag_batches", text, [({"sink": each.name}, each.lag_batches) for each in sinks]
        )
        text = "Whether a sink works: 0 while it fails, or is left out because it does."
        rows = [({"sink": each.name}, float(each.state == "running")) for each in sinks]
        yield self._gauge("sink_up", text, rows)

    # -- families

    def _counter(self, name: str, text: str, rows: Rows) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily, name, text, rows)

    def _gauge(self, name: str, text: str, rows: Rows) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily, name, text, rows)

    def _filled(self, kind: Any, name: str, text: str, rows: Rows) -> Metric:
        labels = list({**self._labels, **(rows[0][0] if rows else {})})
        family: Metric = kind(PREFIX + name, text, labels=labels)
        for row, value in rows:
            family.add_metric([*self._labels.values(), *row.values()], value)  # type: ignore[attr-defined]
        return family

    def _histogram(self, name: str, text: str, label: str | None, rows: Mapping[str, Histogram]) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        labels = [*self._labels, *([label] if label else [])]
        family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
        for value, histogram in rows.items():
            buckets, total = histogram.cumulative()
            family.add_metric([*self._labels.values(), *([value] if label else [])], buckets, total)
        return family
