"""Traces for commands that read logs: what a cache would have done is played into a log that does not stay."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvcache.cli.options import add_cache_sizes, add_shared, add_trace_options, seekable
from kvcache.cli.output import Output
from kvcache.cli.process import leaving_at_sigterm
from kvcache.errors import UsageError

LOG_OR_TRACE = "a log directory, or a trace of requests (`kvcache docs traces`); -: one on stdin"


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declare how a trace in place of a log is read and played."""
    group = parser.add_argument_group(
        "a trace in place of a log, played through a cache as `kvcache run` has it"
    )
    add_trace_options(group)
    add_shared(group, "concurrency")
    add_cache_sizes(group)
    parser.set_defaults(concurrency=None)


_OPTIONS = (
    "trace_block_size",
    "tokenizer",
    "concurrency",
    "tokens_per_block",
    "primary_blocks",
    "secondary_blocks",
)


@contextmanager
def as_log(args: argparse.Namespace, out: Output) -> Iterator[Path]:
    """Yield the log directory `args.log`, or that of a cache that has served the trace `args.log`.

    The latter is removed at the end. Raises UsageError for options of traces beside a log, and what
    `kvcache.cli.playing.play_into` raises.
    """
    if not is_trace(args.log):
        if given := [name for name in _OPTIONS if getattr(args, name) is not None]:
            raise UsageError(f"--{given[0].replace('_', '-')} is for traces, and {args.log} is none")
        yield args.log
        return
    # Other commands have no use for an engine.
    from kvcache.cli.playing import play_into

    with (
        leaving_at_sigterm(),
        TemporaryDirectory(prefix="kvcache-trace-") as directory,
        seekable(args.log) as source,
    ):
        log = Path(directory) / ("stdin" if str(args.log) == "-" else args.log.name)
        play_into(log, argparse.Namespace(**{**vars(args), "trace": source}), out)
        yield log


def is_trace(path: Path) -> bool:
    """Whether it is a file, or a pipe, and so no log directory."""
    return str(path) == "-" or (path.exists() and not path.is_dir())
