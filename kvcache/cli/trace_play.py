"""Playing of a trace's requests: their sizes, a cache sized for them, and the log of one that served them."""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

from kvcache.audit.kv_shape import KVShape
from kvcache.audit.memory import names_model
from kvcache.cli import config as settings
from kvcache.cli.options import CONCURRENCY, TOKENS_PER_BLOCK, SizeInBytes
from kvcache.cli.output import Output
from kvcache.cli.summary import RequestSizes, RunSource
from kvcache.config import KVCacheConfig, Values
from kvcache.errors import Unsupported, UsageError
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.phrases import size
from kvcache.record.outputs import open_log
from kvcache.workload.clock import StepClock
from kvcache.workload.driver import DriveOptions, Engine
from kvcache.workload.reported import ReportedReuse
from kvcache.workload.summary import RunResult
from kvcache.workload.traces import BlockNumbers, TraceRequest, read_trace
from kvcache.workload.waiting_queue import WaitingLimits

_LARGEST_BLOCK = 2048
"""Most tokens of a block that a cache takes over from a trace."""
_SIZES = ("tokens_per_block", "primary_blocks", "secondary_blocks", "secondary_path")
_IN_BYTES = {"primary_blocks": "primary_bytes", "secondary_blocks": "host_cache_size"}
"""Settings in blocks, with their equivalents in bytes."""


def open_trace(
    args: argparse.Namespace,
    shown: Path,
    stop: threading.Event,
    *,
    named: bool = False,
    watch: Callable[[TraceRequest], None] = lambda _: None,
) -> RunSource:
    """Open the requests of `args.trace`, named `shown` in errors; `named` requires that equal prompts are known.

    `watch` is called with each of them. Raises OSError, TraceError, and UsageError if there are none.
    """
    if args.trace.is_dir():
        raise UsageError(f"{args.trace} is a directory: a trace is a file (`kvcache docs traces`)")
    read = partial(
        read_trace,
        args.trace,
        vars(args).get("limit"),
        block_tokens=args.trace_block_size,
        tokenizer=args.tokenizer,
        shown=str(shown),
        named=named,
    )
    sizes = RequestSizes.of(read(), stop, watch)
    if not sizes.requests:
        raise UsageError(f"{shown} contains no requests")
    return RunSource(shown.name, read(), sizes)


def given_sizes(args: argparse.Namespace, sets: list[str]) -> Values:
    """Return the settings of ``--set`` and of the options for cache sizes.

    Sizes in bytes become settings in bytes if the command takes the model from the settings. Raises UsageError.
    """
    own = settings.parse_sets(sets)
    given = {name: value for name in _SIZES if (value := vars(args).get(name)) is not None}
    in_bytes = {name: value for name, value in given.items() if isinstance(value, SizeInBytes)}
    if "model_config" in vars(args):
        given |= {name: _in_blocks(args, name, value) for name, value in in_bytes.items()}
    elif in_bytes:
        if not names_model(settings.read_settings(args.config, own).values):
            raise _unknown_bytes(
                next(iter(in_bytes)), "a model's shape, as in --set num_layers=32 --set head_dim=128"
            )
        for name, value in in_bytes.items():
            del given[name]
            given[_IN_BYTES[name]] = int(value)
    return own | given


def _unknown_bytes(name: str, instead: str) -> UsageError:
    which = name.replace("_", "-")
    return UsageError(f"--{which}: the bytes of a block are unknown: give a number of blocks, or {instead}")


def _in_blocks(args: argparse.Namespace, name: str, value: int) -> int:
    """Return the blocks of the model that fit in a size in bytes."""
    if args.model_config is None:
        raise _unknown_bytes(name, "--model-config")
    model = KVShape.read(args.model_config, dtype=args.kv_dtype, tensor_parallel=args.tensor_parallel)
    tokens = args.tokens_per_block or int(settings.RUN_DEFAULTS["tokens_per_block"])
    block = model.bytes_per_token * tokens
    if value < block:
        raise UsageError(f"--{name.replace('_', '-')}: {size(value)} is less than one block ({size(block)})")
    return value // block


def sized_config(file: Path | None, sets: Values, sizes: RequestSizes, concurrency: int) -> KVCacheConfig:
    """Return the given settings, completed for requests of these sizes."""
    known = settings.read_settings(file, sets).values
    # Settings that determine other defaults are read and checked first.
    first = settings.RUN_DEFAULTS | {"max_sequence_length": sizes.longest}
    if known.get("secondary_path"):
        first["model"] = "kvcache run"  # a secondary file needs the name of a model
    config = settings.load_settings(file, sets, first | {"primary_blocks": 1})
    blocks = sizes.primary_blocks(concurrency, config.tokens_per_block)
    by_requests = {"primary_blocks": blocks, "secondary_blocks": known.get("primary_blocks") or blocks}
    derived = settings.derived_settings(known)
    return settings.load_settings(
        file, sets, first | {name: by_requests[name] for name in by_requests if name in derived}
    )


def require_room(config: KVCacheConfig, sizes: RequestSizes) -> None:
    """Raise for a cache that is too small for even the shortest request: the run would serve none."""
    if config.cross_kv_cache_fraction is not None:
        instead = "omit cross_kv_cache_fraction: traces have no encoder inputs"
        raise Unsupported("an encoder-decoder model", instead)
    obstacle = WaitingLimits.of(config, Layout.of(config)).obstacle(sizes.shortest)
    if obstacle is not None:
        raise UsageError(f"none of the requests fits: {obstacle}")


def note_refused(result: RunResult, out: Output) -> None:
    """Print the number of requests that no cache of this size can serve; raises UsageError if that is all of them."""
    if result.refused:
        first = result.refusals[0]
        if not (result.requests or result.interrupted):
            raise UsageError(f"none of the requests fits: {first.reason}")
        example = f"number {first.request_id}: {first.reason}"
        out.note(f"{result.refused:,} of the requests did not fit, for example {example}")


def play_into(log: Path, args: argparse.Namespace, out: Output) -> tuple[ReportedReuse, Layout, RunResult]:
    """Play `args.trace` at its own times, without tensors, into a log; return its reported values and the cache.

    The log of equal requests in equal caches is equal. Blocks are those of the trace unless another size is given.
    Raises what `open_trace` raises, and UsageError for a trace that does not show which prompts share a beginning.
    """
    concurrency = args.concurrency or CONCURRENCY
    source, reported, args.tokens_per_block = _read(args, out)
    sizes = source.sizes
    # This log need not survive a crash.
    config = sized_config(None, given_sizes(args, ["log.fsync=never"]), sizes, concurrency)
    require_room(config, sizes)
    inputs = (config.model_dump_json(), sizes.digest, concurrency)
    writer = open_log(log, config.log, log_id=sha256(repr(inputs).encode()).digest()[:16])
    clock, options = StepClock(math.inf, start_ns=sizes.start_ns), DriveOptions(concurrency=concurrency)
    times = Substitutes(wall_ns=clock.wall_ns, monotonic_ns=clock.trace_ns)
    with (
        KVCacheManager(config, log=writer, substitutes=times) as manager,
        out.progress("playing", sizes.requests) as update,
    ):
        engine = Engine(manager, source.requests, options, clock=clock, watch=reported.watch)
        result = engine.run(progress=lambda step, done: update(done))
    if result.log_failure is not None:
        raise result.log_failure
    note_refused(result, out)
    return reported, manager.layout, result


def _read(args: argparse.Namespace, out: Output) -> tuple[RunSource, ReportedReuse, int]:
    """Return the requests, their reported values, and the block size: the given one, or else the trace's."""
    given = args.tokens_per_block or settings.read_settings(None, {}).values.get("tokens_per_block")
    numbers, reported = BlockNumbers(int(given or TOKENS_PER_BLOCK)), ReportedReuse()
    with out.progress("reading") as update:

        def watch(request: TraceRequest) -> None:
            _, blocks = numbers.of(request)
            update(reported.see(request, blocks * numbers.tokens_per_block))

        source = open_trace(args, args.log, threading.Event(), named=True, watch=watch)
    if reported.doubt is not None:
        out.warning(reported.doubt)
    own = numbers.tokens_per_block
    return source, reported, int(given or (own if own <= _LARGEST_BLOCK else TOKENS_PER_BLOCK))
