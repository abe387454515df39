"""Summary of a run, for people and for programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from events.errors import LogWriteFailed
from events.types import TokensAppended
from kvcache.cli.events import event_lines
from kvcache.cli.output import Facts, Output, by_level, paint, pick
from kvcache.cli.verification import FeedCheck, Verification
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.phrases import count, duration, iso, printable, share, size
from kvcache.record.restart import Restored
from kvcache.stats import Stats
from kvcache.workload.clock import START_NS, StepClock
from kvcache.workload.copies import TimedCopier
from kvcache.workload.summary import RunResult
from kvcache.workload.traces import TraceRequest
from sinks import SinkStats

if TYPE_CHECKING:
    from kvcache.pools import PoolSizes

LAST_EVENTS = 12
_SIMULATED = "simulated: that of the trace, from {} on, at least {} ms per step (--speed real: wall clock)"


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Sizes of the requests that a cache is made for."""

    requests: int
    tokens: int
    """Tokens of all prompts and outputs."""
    longest: int
    """Tokens of the longest request, prompt and output."""
    shortest: int
    digest: bytes
    """SHA-256 of the requests."""
    start_ns: int = START_NS
    """When the first of them comes, in ns since 1970; of a trace without dates, what a played one shows."""

    @classmethod
    def of(
        cls,
        requests: Iterable[TraceRequest],
        stop: threading.Event,
        watch: Callable[[TraceRequest], None] = lambda _: None,
    ) -> RequestSizes:
        """Sum up requests, each of which is passed to `watch`; ends early if `stop` is set."""
        count = tokens = longest = shortest = 0
        digest, start_ns = sha256(), START_NS
        for request in requests:
            watch(request)
            length = request.input_length + request.output_length
            longest, shortest = max(longest, length), min(shortest, length) if count else length
            if not count and request.begin_ms is not None:
                start_ns = request.begin_ms * 1_000_000
            count, tokens = count + 1, tokens + length
            digest.update(repr(request).encode())
            if stop.is_set():
                break
        return cls(count, tokens, longest, shortest, digest.digest(), start_ns)

    def primary_blocks(self, concurrency: int, tokens_per_block: int) -> int:
        """Return the blocks for `concurrency` requests of average length, and for the longest one."""
        average = -(-self.tokens // max(self.requests, 1))
        return max(-(-self.longest // tokens_per_block), concurrency * -(-average // tokens_per_block))


@dataclass(frozen=True, slots=True)
class RunSource:
    """Requests, and the name of their source."""

    title: str
    requests: Iterable[TraceRequest]
    """Requests, iterable once; a trace is never in memory as a whole."""
    sizes: RequestSizes


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is known at the end of a run."""

    result: RunResult
    stats: Stats
    sinks: tuple[SinkStats, ...]
    seconds: float
    """Seconds in the manager's calls, without the copies, and waiting for the log."""
    log_bytes: int
    dropped_batches: int
    fingerprint: bytes
    verification: Verification
    signal: str | None
    copies: TimedCopier | None
    """Measured copier; None if there were no tensors."""
    feed: FeedCheck | None
    """Result of the attached router; None if there was none."""
    log_failure: LogWriteFailed | None
    """Failure by which the log is incomplete, or has ended the run; None if there was none."""
    restored: Restored | None
    """Blocks restored from secondary; None if there were none to restore."""

    @property
    def requests_per_second(self) -> float:
        """Requests per second that manager and log alone could serve."""
        return self.result.requests / self.seconds if self.seconds else 0.0


def to_json(outcome: Outcome, log: Path | None) -> dict[str, Any]:
    """Return the summary as JSON. Times are in seconds unless the name says otherwise."""
    result, stats, verification = outcome.result, outcome.stats, outcome.verification
    replayed, feed, copies = verification.replayed, outcome.feed, outcome.copies
    copied = ("bytes_offloaded", "bytes_onboarded", "bytes_within_primary", "bytes", "bytes_per_second")
    return {
        **pick(
            result, "requests", "refused", "refusals", "interrupted", "output_tokens", "recomputed_tokens"
        ),
        **pick(result, "checked_blocks", "checked_final_blocks"),
        **pick(stats, "prompt_tokens", "reused_tokens", "reused_tokens_primary", "reused_tokens_secondary"),
        **pick(stats, "reused_tokens_partial", "reused_tokens_own", "hit_rate", "events", "batches"),
        **pick(stats, "blocks_allocated", "blocks_stored", "blocks_removed", "blocks_offloaded"),
        **pick(stats, "blocks_onboarded", "blocks_deduplicated"),
        **pick(outcome, "signal", "dropped_batches", "log_bytes", "seconds", "requests_per_second"),
        "windows": [
            pick(blocks, "most_held") | {"window": window, "cached": by_level(blocks.cached)}
            for window, blocks in result.windows.items()
        ],
        "log": log,
        "log_error": outcome.log_failure and outcome.log_failure.reason,
        "feed": feed and pick(feed, "batches", "agrees", "faults") | {"blocks": by_level(feed.blocks)},
        # A name belongs to a block.
        "sinks": [{"sink": (fields := asdict(sink)).pop("name"), **fields} for sink in outcome.sinks],
        "restored": outcome.restored and _restored_json(outcome.restored),
        "copies": copies and pick(copies, "seconds", *copied),
        "steps": len(result.times),
        "step_us_p50": result.times.percentile_us(50),
        "step_us_p99": result.times.percentile_us(99),
        "fingerprint": outcome.fingerprint.hex(),
        "replay_fingerprint": verification.fingerprint and verification.fingerprint.hex(),
        "replay_seconds": verification.seconds,
        "checkpoints_verified": 0 if replayed is None else replayed.checkpoints_verified,
    }


def _restored_json(restored: Restored) -> dict[str, Any]:
    blocks = pick(restored.survey, "found", "verified", "changed", "in_flight", "unreachable", "recomputed")
    return {"blocks": blocks, **pick(restored, "replay_seconds", "verify_seconds", "verified_bytes")}


def _caches(layout: Layout) -> Facts:
    """Return the blocks of each window."""
    for number, group in enumerate(layout.groups):
        primary, secondary = group.num_blocks
        blocks = f"{primary:,} primary + {secondary:,} secondary blocks of {layout.tokens_per_block} tokens"
        if len(layout.groups) > 1:
            blocks += f": {count(len(group.layers), 'layer')}, window {group.window:,}"
        yield "" if number else "cache", blocks


def describe_start(
    out: Output,
    source: RunSource,
    config: KVCacheConfig,
    pools: PoolSizes | None,
    clock: StepClock,
    log: Path,
    *,
    temporary: bool,
) -> None:
    """Print the source of requests and the cache that they are about to be played into."""
    layout = Layout.of(config)
    block = sum(group.bytes_per_block for group in layout.groups)
    tensors = "none (--no-pools)"
    if pools is not None:
        below = f", {size(pools.secondary)} secondary on the host" if pools.secondary else ""
        tensors = f"{size(pools.primary)} primary on {pools.device}{below}; {size(block)} per block"
    out.heading(f"kvcache run: {printable(source.title)}")
    out.facts(
        [
            ("requests", f"{source.sizes.requests:,} with {source.sizes.tokens:,} tokens"),
            *_caches(layout),
            ("tensors", tensors),
            *([("time", _SIMULATED.format(iso(clock.start_ns)[:10], clock.step_ms))] * (clock.speed is None)),
            ("log", f"{printable(str(log))}{' (removed at the end; --keep keeps it)' if temporary else ''}"),
        ]
    )
    out.line()


def show(outcome: Outcome, log: Path | None, out: Output, *, events: bool) -> None:
    """Print the summary for people; with `events`, the end of the log first."""
    if events and not out.quiet:
        _show_last_events(outcome.verification, out)
    heading = "summary"
    if outcome.result.log_failure is not None:
        heading = "summary (ended early: the log could not be written)"
    elif outcome.signal is not None:
        heading = f"summary (ended{' early' if outcome.result.interrupted else ''} by {outcome.signal})"
    out.heading(heading)
    parts = (_requests, _restored, _blocks, _times, _sinks, partial(_record, log=log))
    out.facts(fact for part in parts for fact in part(outcome))


def _requests(outcome: Outcome) -> Facts:
    result, stats = outcome.result, outcome.stats
    refused = f", {result.refused:,} refused" if result.refused else ""
    yield "requests", f"{result.requests:,} served in {count(len(result.times), 'step')}{refused}"
    reused = f"{stats.reused_tokens:,} were reused: {share(stats.hit_rate)}"
    yield "prompt tokens", f"{stats.prompt_tokens:,}, of which {reused}"
    by_level = (
        f"{stats.reused_tokens_primary:,} from primary, {stats.reused_tokens_secondary:,} from secondary, "
        f"{stats.reused_tokens_partial:,} in partial blocks"
    )
    if own := stats.reused_tokens_own:
        by_level += f"; {own:,} by requests that had computed them before a preemption, not in the share"
    yield "", by_level


def _restored(outcome: Outcome) -> Facts:
    """Return the blocks restored from the secondary file of an earlier run."""
    if (restored := outcome.restored) is None:
        return
    survey = restored.survey
    took = f"{size(restored.verified_bytes)} verified in {duration(restored.verify_seconds)}"
    yield "restored", f"{survey.verified:,} of {count(survey.found, 'secondary block')}, {took}"
    if survey.recomputed:
        yield "", f"{count(survey.recomputed, 'primary block')} before them recomputed"
    gone = {"changed": survey.changed, "in transfer": survey.in_flight, "after lost ones": survey.unreachable}
    if any(gone.values()):
        yield "", "dropped: " + ", ".join(f"{blocks:,} {why}" for why, blocks in gone.items() if blocks)
    yield "", f"the log was read in {duration(restored.replay_seconds)}"


def _blocks(outcome: Outcome) -> Facts:
    stats, result = outcome.stats, outcome.result
    kept = f"{stats.blocks_allocated:,} allocated, {stats.blocks_stored:,} stored"
    yield "blocks", f"{kept}, {stats.blocks_removed:,} removed"
    yield "", f"{stats.blocks_offloaded:,} offloaded, {stats.blocks_onboarded:,} onboarded"
    if len(result.windows) > 1:
        yield "windows", "maximum of blocks held at once, and blocks cached at the end"
        for window, blocks in result.windows.items():
            cached = "{:,} cached in primary, {:,} in secondary".format(*blocks.cached)
            yield "", f"{window:,}: {blocks.most_held:,} held, {cached}"
    if outcome.copies is None:
        yield "bytes", "nothing to compare without pools"
    elif not result.checked_blocks:
        yield "bytes", "nothing to compare: no block was reused"
    else:
        yield "bytes", f"{result.checked_blocks:,} reused blocks compared byte by byte, all equal"


def _times(outcome: Outcome) -> Facts:
    p50, p99 = (duration(outcome.result.times.percentile_us(percent) / 1e6) for percent in (50, 99))
    yield "manager and log", f"{duration(outcome.seconds)}, {outcome.requests_per_second:,.0f} requests/s"
    yield "", f"per step {p50} (median), {p99} (99th percentile)"
    if (copies := outcome.copies) is None:
        return
    if not copies.bytes:
        yield "copies", "none"
        return
    speed = f"{size(copies.bytes)} at {copies.bytes_per_second / 1e9:.2f} GB/s"
    yield "copies", f"{duration(copies.seconds)}, {speed}"
    between = f"{size(copies.bytes_offloaded)} offloaded, {size(copies.bytes_onboarded)} onboarded"
    yield "", f"{between}, {size(copies.bytes_within_primary)} within primary"


def _sinks(outcome: Outcome) -> Facts:
    for number, sink in enumerate(outcome.sinks):
        yield "" if number else "sinks", _sink(sink)
    if (feed := outcome.feed) is not None:
        held = "{:,} full blocks on GPU and {:,} on CPU".format(*feed.blocks)
        verdict = ("same as the cache", "green") if feed.agrees else ("differs from the cache", "red")
        yield "router", f"{held} after {count(feed.batches, 'batch')}: {paint(*verdict)}"


def _sink(sink: SinkStats) -> str:
    text = f"{printable(sink.name)}  {count(sink.batches, 'batch')}, {count(sink.events, 'event')}"
    text += f", {sink.dropped_batches:,} dropped, lag {sink.lag_batches:,}"
    if sink.state != "closed":
        text += paint(f", {sink.state}", "red")
    if sink.last_error is not None:
        text += f" ({printable(sink.last_error)})"
    return text


def _record(outcome: Outcome, log: Path | None) -> Facts:
    stats = outcome.stats
    written = f"{count(stats.events, 'event')} in {count(stats.batches, 'batch')}, {size(outcome.log_bytes)}"
    if outcome.dropped_batches:
        written += paint(f", incomplete: {count(outcome.dropped_batches, 'batch')} lost", "red")
    yield "log", written
    if outcome.log_failure is not None:
        yield "", paint(f"could not be written: {outcome.log_failure.reason}", "red")
    if log is not None:
        yield "", f"kept in {printable(str(log))}"
    yield "replay", _replay(outcome)
    yield "fingerprint", outcome.fingerprint.hex()


def _replay(outcome: Outcome) -> str:
    verification = outcome.verification
    if verification.replayed is None and outcome.log_failure is not None:
        return paint("not verified: the log ends before the run did", "yellow")
    if verification.replayed is None:
        return paint("not verified: interrupted", "yellow")
    if verification.disagrees:
        return paint(f"disagrees: {'; '.join(verification.differences)}", "red")
    checkpoints = count(verification.replayed.checkpoints_verified, "checkpoint")
    verdict = paint("agrees", "green")
    return f"{verdict}: same fingerprint, {checkpoints} verified, {duration(verification.seconds)}"


def _show_last_events(verification: Verification, out: Output) -> None:
    # Every step appends tokens, so these events would hide all others.
    lines = [
        line
        for batch in verification.last_batches
        for line in event_lines(batch, verification.known, TokensAppended)
    ]
    if lines:
        out.heading("last events (without TokensAppended)")
        for line in lines[-LAST_EVENTS:]:
            out.line(line)
        out.line()
