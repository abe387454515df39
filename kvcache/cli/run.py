"""``kvcache run``: play requests through a cache with everything on, and verify its log.

An engine without a model: real pools, every computed token writes bytes that prove their origin, every reused block is
compared, and at the end the replayed log must give the cache's state.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import TYPE_CHECKING, Any

from events.errors import EventsError, LogExists, LogWriteFailed, system_reason
from events.log import LogWriter
from kvcache.cli import config as settings
from kvcache.cli.options import (
    add_cache_sizes,
    add_shared,
    integer,
    natural,
    option,
    seekable,
)
from kvcache.cli.output import Output
from kvcache.cli.process import StopSignals
from kvcache.cli.summary import Outcome, RequestSizes, RunSource, describe_start, show, to_json
from kvcache.cli.trace_play import given_sizes, note_refused, open_trace, require_room, sized_config
from kvcache.cli.verification import FEED_URL, OwnFeed, Verification, verify_own_log
from kvcache.config import LogConfig
from kvcache.device.memory import served_layout
from kvcache.errors import InternalError, KVCacheError, UsageError
from kvcache.fold.fingerprint import fingerprint
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.phrases import count, duration, size
from kvcache.record.outputs import open_log
from kvcache.workload.chats import generate_chats
from kvcache.workload.clock import StepClock, parse_speed
from kvcache.workload.copies import TimedCopier
from kvcache.workload.driver import DriveOptions, Engine
from kvcache.workload.pattern import PoolPattern
from kvcache.workload.summary import RunResult
from sinks import SinkContext, SinkURL, SinkURLError, open_sink
from sinks.router.feed import RouterFeed
from sinks.router.kv_events import kv_events_sink

if TYPE_CHECKING:
    from kvcache.pools import Pools, PoolSizes

_EPILOG = """\
Settings that are not given follow from the requests: max_sequence_length is the length of the longest one,
primary-blocks holds as many average requests as run at once (and the longest one), and secondary-blocks is the same.
Later sources override earlier ones: --config, KVCACHE_* variables, --set, the options above.

Ctrl-C and SIGTERM end the run cleanly: checkpoint, drained sinks, verified log, summary. A second signal, at least a
second later, aborts without a summary. SIGHUP reopens the files of file: sinks if there is no terminal.
With -q and a stdout: sink, stdout contains only events.
The log applies backpressure rather than lose events, and ends the run if it cannot be written, unless
log.overflow=drop is set. If the log is incomplete, the summary reports it and the exit code is 1.
"""
USERS = 128
"""Number of conversations of a run without a trace, which takes some seconds."""
_REPORT = "; this is a bug in kvcache, please report it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Play requests through a cache and verify every reused byte and the log."
    parser.epilog = _EPILOG
    option(
        parser,
        "TRACE",
        "trace of requests in the format of Mooncake, Qwen-Bailian, Azure or OpenAI calls (`kvcache docs traces`; - "
        "for stdin); default: generated chats",
        nargs="?",
    )
    settings.add_settings(parser)
    _add_load_options(parser)
    _add_cache_options(parser)
    _add_event_options(parser)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = partial(option, group)
    add("--limit N", "play only the first N requests")
    add_shared(group, "trace_block_size", "tokenizer", "concurrency")
    add("--seed N", "seed of the chats and token ids (default: 0)", type=integer, default=0)
    add(
        "--speed real|N|max",
        "pace: that of the trace, N times as fast, or as fast as possible (default: max). With max, equal runs write "
        "equal logs: times are simulated, at least 20 ms per step, from the date of the trace or 2026-01-01 on, also "
        "with --continue",
        default="max",
    )


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    add = partial(option, group)
    add_cache_sizes(group, "a model in the settings (num_layers, ...)")
    add(
        "--secondary-path FILE",
        "file that backs secondary memory; its blocks are restored with --continue, even after kill -9",
        type=str,
    )
    add("--no-pools", "manage metadata only, without tensors and torch")


def _add_event_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("events")
    _add_sink_options(group)
    add = partial(option, group)
    add("--wait-subscribers N", "start when each zmq+pub: sink has N subscribers", default=0)
    add(
        "--check-feed",
        "attach a router to a feed of this run, and compare its blocks with the cache at the end (implied without "
        "TRACE)",
    )
    add("--log DIR", "directory of the log (default: a temporary one)")
    add("--continue --resume", "append a new epoch to an existing log in --log", dest="resume")
    add("--keep", "keep a temporary log")
    add(
        "--hold SECONDS",
        "seconds to keep the sinks open after the end (default: 0)",
        default=0.0,
    )
    add_shared(group, json="print the summary as JSON, and nothing else on stdout")


def run(args: argparse.Namespace, out: Output) -> int:
    """Play, verify, summarize."""
    _take_kv_events(args, out)
    if args.json and _has_sink(args, "stdout"):
        raise UsageError(
            "--json cannot share stdout with a sink: send the events to a file, as in --sink file:events.jsonl"
        )
    _require_feed(args)
    if args.resume and args.log is None:
        raise UsageError("--continue requires --log DIR")
    settings.warn_of_unknown(out)
    with ExitStack() as opened:
        stop = opened.enter_context(StopSignals())
        opened.enter_context(_log_directory(args, out))
        if args.trace is not None:
            args.shown, args.trace = args.trace, opened.enter_context(seekable(args.trace))
        outcome = _Run(args, out, stop).play()
        kept = _settle(args, evidence=outcome.verification.disagrees)
        if args.json:
            out.json(to_json(outcome, kept))
        elif not (out.quiet and _has_sink(args, "stdout")):
            # With events and --quiet, stdout is for a program, for which every line is an event.
            show(outcome, kept, out, events=args.trace is None)
        return _exit_code(outcome, stop, out)


def _has_sink(args: argparse.Namespace, scheme: str) -> bool:
    return any(SinkURL.parse(url).scheme == scheme for url in args.sinks)


def _require_feed(args: argparse.Namespace) -> None:
    """Raise UsageError rather than wait for subscribers that cannot exist."""
    opened = (open_sink(url, SinkContext(key_bytes=0, tokens_per_block=1)) for url in args.sinks)
    feeds = (sink.feeds_routers for sink in opened if isinstance(sink, RouterFeed))
    if args.wait_subscribers and not any(feeds):
        raise UsageError(
            "--wait-subscribers needs a sink that feeds routers: add --sink 'zmq+pub://127.0.0.1:5557?replay=5558'"
        )


def _exit_code(outcome: Outcome, stop: StopSignals, out: Output) -> int:
    result = outcome.result
    if outcome.log_failure is not None:
        raise outcome.log_failure
    if outcome.verification.disagrees:
        differences = "; ".join(outcome.verification.differences)
        raise InternalError(f"the log does not replay to the state of the cache: {differences}{_REPORT}")
    if outcome.feed is not None and not outcome.feed.agrees:
        faults = f"({count(outcome.feed.faults, 'fault')} in the feed)"
        raise InternalError(f"the router's blocks differ from those of the cache {faults}{_REPORT}")
    note_refused(result, out)
    return stop.exit_code


def _pools_module() -> ModuleType:
    """Import `kvcache.pools`; raises UsageError without torch."""
    try:
        from kvcache import pools
    except ImportError as error:
        raise UsageError(f"{error}, or run without tensors (--no-pools)") from error
    return pools


class _Run:
    """One run, from its arguments to its outcome."""

    def __init__(self, args: argparse.Namespace, out: Output, stop: StopSignals) -> None:
        self._args, self._out, self._stop = args, out, stop
        speed, chats = parse_speed(args.speed), args.trace is None
        if chats:
            requests = generate_chats(USERS, args.seed)[: args.limit]
            title = f"generated chats (seed {args.seed})"
            self._source = RunSource(title, requests, RequestSizes.of(requests, stop))
        else:
            self._source = open_trace(args, args.shown, stop)
        sizes = self._source.sizes
        self._clock = StepClock(speed, start_ns=sizes.start_ns)
        self._config = sized_config(args.config, given_sizes(args, args.sets), sizes, args.concurrency)
        if self._config.free_gpu_memory_fraction is not None and not args.no_pools:
            self._config = _pools_module().sized(self._config)
        if not (stop.is_set() or args.json):  # a program gets the refusals in its summary
            require_room(self._config, sizes)
        self._routed = (args.check_feed or chats) and self._config.block_hash != "none"
        self._pools: Pools | None = None
        self._copier: TimedCopier | None = None

    def play(self) -> Outcome:
        """Play the requests, and verify the log."""
        args, out, stop, config = self._args, self._out, self._stop, self._config
        for url in args.sinks:
            # Errors in a URL are reported before there are pools and a log.
            open_sink(url, SinkContext(key_bytes=0, tokens_per_block=config.tokens_per_block))
        layout = served_layout(config)
        sizes: PoolSizes | None = None if args.no_pools else _pools_module().PoolSizes(layout)
        if sizes is not None:
            sizes.require_room(in_file=config.secondary_path is not None)
        log = _open_log(args, config.log, self._log_id(), out)
        if not (args.json or out.quiet):
            removed = args.temporary and not args.keep
            describe_start(out, self._source, config, sizes, self._clock, args.log, temporary=removed)
        manager = self._open_manager(sizes, log)
        if _has_sink(args, "file"):
            stop.at_hangup(manager.reopen_sinks)
        router = OwnFeed(manager) if self._routed else None
        if args.wait_subscribers:
            readers = count(args.wait_subscribers, "subscriber")
            out.note(f"waiting for {readers} of each zmq+pub: sink; Ctrl-C stops waiting")
            # Not for those of the run's own feed: no other process knows its port.
            for feed in manager.feeds[: -1 if router else None]:
                feed.wait_subscribers(args.wait_subscribers, math.inf, stop.is_set)
        return self._finish(manager, log, self._drive(manager), router)

    def _log_id(self) -> bytes | None:
        """Return the same id for equal runs, so that they write equal logs; None at other speeds than max."""
        if self._clock.speed is not None:
            return None
        args = self._args
        inputs = (self._config.model_dump_json(), self._source.sizes.digest)
        return sha256(repr((*inputs, args.concurrency, args.seed, args.no_pools)).encode()).digest()[:16]

    def _open_manager(self, sizes: PoolSizes | None, log: LogWriter) -> KVCacheManager:
        # A sink on stdout writes past the buffer, and must not overtake earlier output.
        sys.stdout.flush()
        sinks = [*self._args.sinks, FEED_URL] if self._routed else self._args.sinks
        try:
            if sizes is not None:
                self._pools = self._allocate(sizes)
                self._copier = TimedCopier(self._pools.copier(), sizes.layout)
            clock = Substitutes(wall_ns=self._clock.wall_ns, monotonic_ns=self._clock.trace_ns)
            options: dict[str, Any] = {"copier": self._copier, "sinks": sinks, "substitutes": clock}
            if self._config.secondary_path is None:
                return KVCacheManager(self._config, pools=self._pools, log=log, **options)
            again = None if self._pools is None else PoolPattern(self._pools).recompute
            return KVCacheManager.open(self._config, log, pools=self._pools, recompute=again, **options)
        except BaseException:
            log.close()
            raise

    def _allocate(self, sizes: PoolSizes) -> Pools:
        """Allocate the blocks, with progress and a note on slow host memory."""
        from kvcache.pools import Pools

        out, config, path = self._out, self._config, self._config.secondary_path
        with out.progress("host memory", sizes.secondary) as update:
            pools = Pools(sizes.layout, sizes.device, path, config, update)
        if pools.bytes_ready and not self._args.json:
            out.note(f"host memory: {size(pools.bytes_ready)} prepared in {duration(pools.ready_seconds)}")
        return pools

    def _drive(self, manager: KVCacheManager) -> RunResult:
        args, source = self._args, self._source
        # Event lines on the same terminal would break the bar.
        bar = Output(quiet=True) if _has_sink(args, "stdout") else self._out
        try:
            with bar.progress("playing", source.sizes.requests) as update:
                engine = Engine(
                    manager,
                    source.requests,
                    DriveOptions(concurrency=args.concurrency, seed=args.seed),
                    pools=self._pools,
                    copies=self._copier,
                    clock=self._clock,
                )
                return engine.run(self._stop, lambda step, done: update(done))
        except BaseException:
            # The first error must be the one that is reported.
            with suppress(KVCacheError, EventsError, OSError):
                manager.close()
            raise
        finally:
            # A run that ends early has not read its trace to the end.
            if isinstance(source.requests, Generator):
                source.requests.close()

    def _finish(
        self, manager: KVCacheManager, log: LogWriter, result: RunResult, router: OwnFeed | None
    ) -> Outcome:
        args, out, stop = self._args, self._out, self._stop
        started = time.perf_counter()
        with suppress(LogWriteFailed):  # closing shows if it is over by then
            log.flush()
        drained = time.perf_counter() - started
        if args.hold and not stop.is_set():
            out.note(f"keeping the sinks open for {args.hold:g} s; Ctrl-C closes them")
            stop.wait(args.hold)
        feed = router.finish() if router is not None else None
        incomplete = None
        try:
            manager.close()
        except LogWriteFailed as error:
            incomplete = error
        live = fingerprint(manager.state)
        verification = verify_own_log(log, live, stop, out) if incomplete is None else Verification()
        return Outcome(
            result=result,
            stats=manager.stats(),
            sinks=manager.sink_stats(),
            seconds=result.times.seconds() + drained,
            log_bytes=log.bytes_written,
            dropped_batches=log.dropped_batches,
            fingerprint=live,
            verification=verification,
            signal=None if stop.first is None else stop.first.name,
            copies=self._copier,
            feed=feed,
            log_failure=incomplete or result.log_failure,
            restored=manager.restored,
        )


# -- sinks of events


def _add_sink_options(add: argparse._ArgumentGroup) -> None:
    """Declare the options for sinks."""
    option(
        add,
        "--sink URL",
        "destination of events, as in stdout:, file:e.jsonl or zmq+pub://127.0.0.1:5557?replay=5558",
        action="append",
        default=[],
        dest="sinks",
    )
    option(
        add,
        "--kv-events-config JSON",
        "publish to routers, configured by vLLM's JSON or @FILE: enable_kv_cache_events (default: false), publisher "
        "(zmq), endpoint (tcp://*:5557), replay_endpoint, buffer_steps, hwm, max_queue_size, topic",
    )
    option(
        add,
        "--kv-events-options OPTIONS",
        "further options of the zmq+pub: sink, as in 'curve_key=K&curve_clients=DIR'",
        default="",
    )
    option(
        add,
        "--kv-events-rank N",
        "data-parallel rank, added to both ports (default: 0)",
        type=natural,
        default=0,
    )


def _take_kv_events(args: argparse.Namespace, out: Output) -> None:
    """Add the sink of vLLM's configuration to the given ones. Raises UsageError."""
    if args.kv_events_config is None:
        if args.kv_events_options or args.kv_events_rank:
            raise UsageError("--kv-events-options and --kv-events-rank require --kv-events-config JSON")
        return
    config = _given_json(args.kv_events_config)
    url = kv_events_sink(config, rank=args.kv_events_rank, options=args.kv_events_options)
    if url is None:
        out.warning(
            "--kv-events-config enables no sink: set "
            '"enable_kv_cache_events": true, and a "publisher" other than "null"'
        )
        return
    try:
        open_sink(url, SinkContext(0, 1))
    except SinkURLError as error:
        where = "give options of the sink in --kv-events-options, as in --kv-events-options insecure=1"
        raise UsageError(f"--kv-events-config: {error.reason}; {where}") from None
    args.sinks.append(url)


def _given_json(config: str) -> str:
    """Return the given JSON, or that in a file named by @."""
    if not config.startswith("@"):
        return config
    try:
        return Path(config[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = system_reason(error, "it is not text in UTF-8")
        raise UsageError(f"--kv-events-config: {config[1:]} cannot be read: {reason}") from None


# -- the directory of the log


@contextmanager
def _log_directory(args: argparse.Namespace, out: Output) -> Iterator[None]:
    """Make a temporary directory if none is given; if the run fails it is removed, unless it is evidence."""
    args.temporary, args.log = args.log is None, args.log or Path(tempfile.mkdtemp(prefix="kvcache-run-"))
    try:
        yield
    except BaseException as error:
        kept = _settle(args, evidence=isinstance(error, InternalError))
        if kept is not None and args.temporary:
            out.note(f"the log was kept in {kept}")
        raise


def _settle(args: argparse.Namespace, *, evidence: bool) -> Path | None:
    """Remove a temporary directory unless it is needed; return the directory if it stays."""
    log: Path = args.log
    if args.temporary and not ((args.keep or evidence) and any(log.glob("*.kvlog"))):
        rmtree(log, ignore_errors=True)
        return None
    return log


def _open_log(args: argparse.Namespace, config: LogConfig, log_id: bytes | None, out: Output) -> LogWriter:
    """Open the log, a new one under this id (None: one of its own)."""
    if os.path.isfile(args.log):  # noqa: PTH113  Path.is_file raises for a path that is too long
        raise UsageError(f"{args.log} is a file; --log takes a directory")
    try:
        writer = open_log(args.log, config, log_id=log_id, resume=args.resume)
    except LogExists:
        raise UsageError(
            f"{args.log} already contains a log: choose another directory, or add --continue to append to it"
        ) from None
    if args.resume and writer.epoch_started.previous_epoch is None:
        out.note(f"{args.log} is new: nothing to continue")
    return writer
