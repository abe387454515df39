"""``kvcache replay``: the state in a log, at its end or at any earlier batch."""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import asdict

from events.log import LogReader
from events.structs import LEVEL_NAMES
from events.types import PRIMARY, SECONDARY
from kvcache.audit.explanation import group_in_words
from kvcache.audit.tables import occupancy
from kvcache.cli import feed_log, times
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Facts, Output, bar, by_level, end_json, paint, pick, stamp
from kvcache.cli.times import Times, UpTo
from kvcache.errors import InternalError
from kvcache.fold.group import Group
from kvcache.fold.state import CacheState, resident_names
from kvcache.phrases import batches, count, describe_end, printable
from kvcache.replay import Replayed, fold

_BAR = 30
_BARS = "█ held  ▒ cached  · blank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Replay a log, and show the state of the cache at its end or after a batch."
    parser.epilog = (
        "Replay starts from the newest snapshot at or before the batch; with --verify, from the start of the log. A "
        "torn\nend (the writer was killed) is reported but is no error; damage is an error, with exit code 1.\n\n"
        + times.FORMS_HELP
    )
    add_shared(parser, "log", "time", "json", at="last batch to replay (default: the last one)")
    purpose = "compare all checkpoints with the replay, and check the state's invariants"
    option(parser, "--verify", purpose)


def run(args: argparse.Namespace, out: Output) -> int:
    """Fold the log, and print the state."""
    if feed_log.is_feed_log(args.log):
        return feed_log.replay(args, out)
    reader = LogReader(args.log) if args.verify else times.state_before(args.log, args.at)
    batches = UpTo(reader, args.at)
    with out.progress("replaying") as update:
        replayed = fold(batches, verify=args.verify, progress=update)
    replayed.snapshot_seq = None if reader.snapshot is None else reader.snapshot.seq
    if batches.ended:
        replayed.end = reader.end
    batches.check()
    if args.verify:
        replayed.check()
    if args.json:
        out.json(to_json(replayed, verified=args.verify))
    else:
        when = describe_point(replayed, Times(args.time, batches.first_ts))
        _show(f"{printable(str(args.log))}: the cache after {when}", replayed, out, verified=args.verify)
    if replayed.checkpoints_failed:
        failed = replayed.checkpoints_failed
        shown = ", ".join(map(str, failed[:5])) + (", ..." if len(failed) > 5 else "")
        wrong = count(len(failed), "checkpoint")
        raise InternalError(f"{wrong} disagree with the replay, in batch {shown}")
    return 0


def describe_point(replayed: Replayed, times: Times) -> str:
    """Format the last folded batch and its time."""
    when = "" if replayed.last_ts is None else f" ({times.of(replayed.last_ts)})"
    return f"batch {replayed.last_seq:,}{when}"


def to_json(replayed: Replayed, *, verified: bool) -> dict[str, Any]:
    """Return the state's summary. Blocks per level: all, held by sequences, cached and unreferenced, blank."""
    state = replayed.state
    sharing = [
        pick(each, group="index")
        | pick(each.created, "kind", "window")
        | {"held": len(each.holders), "named": len(each.names)}
        for each in state.positional
    ]
    return {
        **stamp(replayed.last_seq, replayed.last_ts),
        **pick(replayed, "snapshot_seq", "batches", "events", "checkpoints_verified", "checkpoints_failed"),
        **pick(state, "epoch", "tokens_recorded"),
        "groups": [
            levels | dict(zip(("prefixes", "runs", "namespaces"), _tree(group), strict=True))
            for levels, group in zip(levels_json(state), state.groups, strict=True)
        ],
        "sharing": sharing,
        "for_routers": by_level(_for_routers(state)),
        "num_sequences": len(state.sequences),
        "num_transfers": len(state.transfers),
        "fingerprint": replayed.fingerprint.hex(),
        "verified": verified,
        "gaps": [asdict(gap) for gap in replayed.gaps],
        "end": end_json(replayed.end),
    }


def show_levels(state: CacheState, out: Output, *, bars: bool = False) -> None:
    """Print a row for each level of each window that has blocks; a single window is not named."""
    levels = [each for each in occupancy(state) if each.blocks or each.level == LEVEL_NAMES[PRIMARY]]
    rows = [
        ({"window": each.window} if len(state.groups) > 1 else {})
        | {"level": each.level, "blocks": each.blocks, "held": each.held}
        | {"cached, free to evict": each.unreferenced, "blank": each.blank}
        | ({_BARS: bar(each.held, each.unreferenced, each.blocks, _BAR)} if bars else {})
        for each in levels
    ]
    styles = ["yellow" if bars and each.blocks and each.held == each.blocks else "" for each in levels]
    out.table(rows, styles=styles)


def has_secondary(state: CacheState) -> bool:
    """Return True if there is a second level."""
    return any(group.levels[SECONDARY].size for group in state.groups)


def levels_json(state: CacheState) -> list[dict[str, Any]]:
    """Return the levels of each window. Blocks: all, held by sequences, cached and unreferenced, blank."""
    levels = occupancy(state)
    windows = [levels[at : at + len(LEVEL_NAMES)] for at in range(0, len(levels), len(LEVEL_NAMES))]
    sizes = ("blocks", "held", "unreferenced", "blank")
    return [{"window": of[0].window, **{each.level: pick(each, *sizes) for each in of}} for of in windows]


def _tree(group: Group) -> tuple[int, int, int]:
    """Return the numbers of maximal cached prefixes, runs, and namespaces."""
    runs = group.tree.runs.values()
    return sum(not run.children for run in runs), len(runs), len(group.tree.roots)


def _show(title: str, replayed: Replayed, out: Output, *, verified: bool) -> None:
    out.heading(f"{title}, epoch {replayed.state.epoch}")
    show_levels(replayed.state, out)
    out.line()
    out.facts(_facts(replayed, verified=verified))


def _facts(replayed: Replayed, *, verified: bool) -> Facts:
    state = replayed.state
    yield "sequences", f"{len(state.sequences):,} running"
    if state.created is not None and state.created.engine:
        yield "decided by", printable(state.created.engine)
    for each in state.positional:
        own = f" of {len(each.pool):,} of its own" if each.pool else ""
        has = f"{len(each.holders):,} blocks held, {len(each.names):,} named{own}"
        label = "other group" if own else "shares primary"
        yield label, f"{group_in_words(each.index, each.created.kind)}: {has}"
    for group in state.groups:
        leaves, runs, namespaces = _tree(group)
        where = f" of window {group.window:,}" * (len(state.groups) > 1)
        yield "prefixes", f"{leaves:,} in {count(runs, 'run')}, {count(namespaces, 'namespace')}{where}"
    if replayed.snapshot_seq is not None:
        yield (
            "began with",
            f"the snapshot of batch {replayed.snapshot_seq:,} (with --verify, the start of the log)",
        )
    yield "replayed", f"{count(replayed.events, 'event')} in {count(replayed.batches, 'batch')}"
    yield "checkpoints", _checkpoints(replayed, verified=verified)
    for gap in replayed.gaps:
        missing = f"{batches(gap.first_seq, gap.last_seq, 'is', 'are')} missing"
        yield "gap", paint(f"{missing}: {printable(gap.reason)}", "yellow")
    yield "end of the log", "not reached" if replayed.end is None else describe_end(replayed.end)
    primary, secondary = _for_routers(state)
    also = f", {secondary:,} in secondary" if has_secondary(state) else ""
    yield "for routers", f"{primary:,} full blocks in primary{also}"
    yield "fingerprint", replayed.fingerprint.hex()


def _for_routers(state: CacheState) -> list[int]:
    """Return the blocks per level that a feed publishes: without partial ones, and those in transfer between levels."""
    groups = range(len(state.groups))
    return [sum(len(resident_names(state, level, each)) for each in groups) for level in (PRIMARY, SECONDARY)]


def _checkpoints(replayed: Replayed, *, verified: bool) -> str:
    if not verified:
        return "not compared (use --verify)"
    if replayed.checkpoints_failed:
        agree, disagree = replayed.checkpoints_verified, len(replayed.checkpoints_failed)
        return paint(f"{agree:,} agree, {disagree:,} disagree", "red")
    if not replayed.checkpoints_verified:
        where = "in the log" if replayed.end is not None else "up to there"
        return f"none {where}; all invariants hold"
    return f"{replayed.checkpoints_verified:,} compared: {paint('all agree', 'green')}; all invariants hold"
