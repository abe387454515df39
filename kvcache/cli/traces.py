"""Traces for commands that read logs: what a cache would have done is played into a log, which may be kept."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import lexists
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.cli.options import (
    TOKENS_PER_BLOCK,
    add_cache_sizes,
    add_shared,
    option,
    seekable,
)
from kvcache.cli.output import Facts, Output, by_level, pick
from kvcache.cli.process import leaving_at_sigterm
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, share

if TYPE_CHECKING:
    from kvcache.workload.reported import ReportedReuse
    from kvcache.workload.summary import Refusal

LOG_OR_TRACE = "a log directory, or a trace of requests (`kvcache docs traces`; - for stdin)"


class Served(NamedTuple):
    """A log, and how it was made if it comes from a trace that was played through a cache."""

    log: Path
    reported: ReportedReuse | None = None
    """Reported values of the trace; None, and the others empty, if there is no trace."""
    num_blocks: tuple[int, ...] = ()
    """Blocks of the cache by level."""
    tokens_per_block: int = 0
    refused: int = 0
    """Number of requests that no cache of this size can serve."""
    refusals: Sequence[Refusal] = ()
    """First of them, by place in the trace."""

    @property
    def cache(self) -> str:
        """The cache, as in "4,000 + 0 blocks of 512 tokens"."""
        return f"{' + '.join(f'{each:,}' for each in self.num_blocks)} blocks of {self.tokens_per_block:,} tokens"

    def facts(self) -> Facts:
        """Yield the cache, and the requests that did not fit; nothing without a trace."""
        if self.reported is not None:
            yield "played through", f"{self.cache}, at the trace's own times"
        if self.refused:
            first = self.refusals[0]
            said = f"{self.refused:,} requests, such as number {first.request_id}: {first.reason}"
            yield "did not fit", said

    def to_json(self) -> dict[str, Any]:
        """Return the same under its key."""
        if self.reported is None:
            return {}
        refusals = [pick(each, "request_id", "reason") for each in self.refusals]
        sizes = {"num_blocks": by_level(self.num_blocks)} | pick(self, "tokens_per_block", "refused")
        return {"played": sizes | {"refusals": refusals}}


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declare the options for reading and playing a trace in place of a log."""
    group = parser.add_argument_group("for a trace, which is played through a cache")
    add_shared(group, "trace_block_size", "tokenizer", "concurrency")
    own = f"tokens per block (default: those of the trace's hash_ids, or {TOKENS_PER_BLOCK} if it has tokens)"
    add_cache_sizes(group, "--model-config", own)
    option(group, "--keep-log DIR", "new directory in which to keep the log of that cache")
    parser.set_defaults(concurrency=None)


_OPTIONS = (
    "trace_block_size",
    "tokenizer",
    "concurrency",
    "tokens_per_block",
    "primary_blocks",
    "secondary_blocks",
    "keep_log",
)


@contextmanager
def as_log(args: argparse.Namespace, out: Output) -> Iterator[Served]:
    """Yield the log directory `args.log`, or that of a cache that has served the trace `args.log`.

    The latter is removed at the end, unless `args.keep_log` names its place. Raises UsageError for options of
    traces given with a log, and for an existing place; and what `kvcache.cli.trace_play.play_into` raises.
    """
    if not is_trace(args.log):
        if given := [name for name in _OPTIONS if getattr(args, name) is not None]:
            raise UsageError(
                f"--{given[0].replace('_', '-')} is only valid for traces, and {args.log} is not one"
            )
        yield Served(args.log)
        return
    kept: Path | None = args.keep_log
    if kept is not None and (lexists(kept) or not kept.parent.is_dir()):
        raise UsageError(f"--keep-log {kept}: give a new directory, in an existing one")
    # Other commands do not need an engine.
    from kvcache.cli.trace_play import play_into

    with (
        leaving_at_sigterm(),
        TemporaryDirectory(prefix="kvcache-trace-", dir=None if kept is None else kept.parent) as directory,
        seekable(args.log) as source,
    ):
        log = Path(directory) / ("stdin" if str(args.log) == "-" else args.log.name)
        reported, layout, result = play_into(log, argparse.Namespace(**{**vars(args), "trace": source}), out)
        blocks, size = layout.groups[0].num_blocks, layout.tokens_per_block
        played = Served(log, reported, blocks, size, result.refused, result.refusals)
        out.note(
            f"{printable(str(args.log))} is a trace: played at its own times through a cache of {played.cache} "
            "(--primary-blocks, --secondary-blocks, --tokens-per-block)"
        )
        yield played if kept is None else played._replace(log=log.rename(kept))


def is_trace(path: Path) -> bool:
    """Return True if it is a file, or a pipe, and so no log directory."""
    return str(path) == "-" or (path.exists() and not path.is_dir())


# -- reported values of a trace


def show_reported(reported: ReportedReuse | None, out: Output) -> None:
    """Print the service's cached tokens next to the expected ones, by hour; nothing if it did not report them."""
    if reported is None or not (hours := reported.hours):
        return
    rows = [
        {
            "hour": f"+{each.hour} h",
            "requests": each.requests,
            "prompt tokens": each.prompt_tokens,
            "reported cached": each.reported,
            "this cache": each.played,
            "unlimited": each.unlimited,
            "reported - this cache": f"{each.reported - each.played:+,}",
            "of the prompts": f"{(each.reported - each.played) / each.prompt_tokens:+.1%}".replace("%", " %"),
        }
        for each in hours
    ]
    out.table(rows, right=list(rows[0]), gap=True)
    out.line(
        "this cache, unlimited: tokens in full blocks that the cache above would reuse, and an unlimited one"
    )


def reported_in_words(reported: ReportedReuse) -> str | None:
    """Format the reported values in one line, next to the maximum for any cache size; None if there are none."""
    hours = reported.hours
    if not (tokens := sum(each.prompt_tokens for each in hours)):
        return None
    cached, unlimited = sum(each.reported for each in hours), sum(each.unlimited for each in hours)
    prompts = count(sum(each.requests for each in hours), "prompt")
    return (
        f"the trace reports {share(cached / tokens)} of the tokens of {prompts} as cached; an unlimited cache would "
        f"reuse {share(unlimited / tokens)}, in full blocks"
    )


def reported_json(reported: ReportedReuse | None, *, played: bool = True) -> dict[str, Any]:
    """Return all reported values under their key, for a trace alone; `played` adds those of a cache."""
    if reported is None:
        return {}
    ours, theirs = reported.tokens
    lengths = pick(reported, requests="lengths", differing="other_lengths")
    cached = {"cached_tokens": "played"} if played else {}
    named = {"reported_tokens": "reported", "unlimited_tokens": "unlimited", **cached}
    return {
        "reported": {
            "lengths": lengths | {"prompt_tokens": ours, "reported_tokens": theirs},
            "hours": [pick(each, "hour", "requests", "prompt_tokens", **named) for each in reported.hours],
        }
    }
