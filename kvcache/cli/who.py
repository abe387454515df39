"""``kvcache who``: requests and block in a slot at a moment of a log, and its earlier occupants."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from events.log import LogReader
from events.structs import LEVEL_NAMES
from kvcache.audit.slots import Occupant, SlotChange, SlotHistory, SlotWatch
from kvcache.cli import feed_log, times
from kvcache.cli.options import add_shared, natural, option
from kvcache.cli.output import Output, pick, stamp
from kvcache.cli.replay import describe_point
from kvcache.cli.times import Times, UpTo
from kvcache.errors import UsageError
from kvcache.phrases import count, printable
from kvcache.replay import Replayed

_SHOWN = 20
"""Maximum number of changes printed as text; JSON has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show which requests hold a slot of the cache after a batch, which block is cached in it, and the history of "
        "the slot, event by event."
    )
    parser.epilog = (
        "The history begins at the start of the log, which is a snapshot if the log was pruned. Block numbers are "
        "positions\nin a prompt, from 0.\n\n" + times.FORMS_HELP
    )
    add_shared(parser, "log", "time", "json", at="batch after which to look (default: the last one)")
    add, level = partial(option, parser), LEVEL_NAMES[0]
    add("--slot N", "slot number, as in block tables", type=natural, required=True)
    add("--level", f"level of the slot (default: {level})", choices=LEVEL_NAMES, default=level)
    add("--group N", "only the window of this group (default: all windows)", type=natural)


def run(args: argparse.Namespace, out: Output) -> int:
    """Fold, watch the slot, print."""
    if feed_log.is_feed_log(args.log):
        raise UsageError(
            "this log records events published by engines, which do not name slots: give the log of a cache"
        )
    watch = SlotWatch(LEVEL_NAMES.index(args.level), args.slot, args.group)
    batches = UpTo(LogReader(args.log), args.at)
    with out.progress("replaying") as update:
        replayed = watch.fold(batches, progress=update)
    batches.check()
    histories = watch.histories(replayed.state)
    if not histories:
        raise UsageError(_no_such_slot(args, replayed))
    if args.json:
        out.json(to_json(args, replayed, histories))
        return 0
    times_of = Times(args.time, batches.first_ts)
    for number, history in enumerate(histories):
        if number:
            out.line()
        window = f", window {history.window:,} (group {history.group})" * (len(replayed.state.groups) > 1)
        out.heading(f"slot {args.slot:,} of {args.level}{window}, after {describe_point(replayed, times_of)}")
        _show(history, times_of, out)
    return 0


def _no_such_slot(args: argparse.Namespace, replayed: Replayed) -> str:
    if replayed.state.created is None:
        return f"{args.log} has no cache: its first batch is missing"
    sizes = [group.levels[LEVEL_NAMES.index(args.level)].size for group in replayed.state.groups]
    if args.group is not None and args.group >= len(sizes):
        return f"no group {args.group}: the cache has {count(len(sizes), 'group')}, counted from 0"
    size = max(sizes) if args.group is None else sizes[args.group]
    return f"no slot {args.slot:,} in {args.level}: it has {count(size, 'slot')}, counted from 0"


def _show(history: SlotHistory, when: Times, out: Output) -> None:
    now, changes = history.now, history.changes
    last = changes[-1] if changes else None
    since = f"{_type(last)} {last.seq}.{last.index} ({when.of(last.ts)})" if last else "the log's beginning"
    out.facts([("now", _in_words(now)), ("since", since)])
    rows = [
        {
            "event": f"{each.seq}.{each.index}",
            "time": when.of(each.ts),
            "type": _type(each),
            "block": "" if each.occupant.block is None else each.occupant.block,
            "name": _name(each.occupant),
            "held by": _holders(each.occupant),
        }
        for each in changes[-_SHOWN:]
    ]
    out.table(rows, right=("event", "time", "block"), gap=True)
    if len(changes) > _SHOWN:
        out.line(f"{count(len(changes) - _SHOWN, 'earlier change')} not shown; --json prints all")


def _type(change: SlotChange) -> str:
    return change.type if change.why is None else f"{change.type} ({change.why})"


def _in_words(occupant: Occupant) -> str:
    if occupant.block is None and not occupant.requests:
        return "blank"
    if occupant.of_group is not None:
        return f"{_in_words(occupant._replace(of_group=None))}, in group {occupant.of_group}"
    holders = f"held by {_holders(occupant)}" if occupant.requests else "held by no request"
    if not occupant.cached:
        which = (
            "replaced in its table" if occupant.block is None else f"block {occupant.block:,}, not cached yet"
        )
        return f"{which}, {holders}"
    name = "" if occupant.name is None else f" as {occupant.name}"
    return f"block {occupant.block:,}, cached{name}{'' if occupant.landed else ', still being copied'}, {holders}"


def _name(occupant: Occupant) -> str:
    if not occupant.cached:
        return ""
    return (occupant.name or "cached") + ("" if occupant.landed else ", being copied")


def _holders(occupant: Occupant) -> str:
    return ", ".join(printable(str(each)) for each in occupant.requests)


def to_json(args: argparse.Namespace, replayed: Replayed, histories: list[SlotHistory]) -> dict[str, Any]:
    """Return the occupants of the slot, and all changes, the last of which led to them."""
    return {
        **stamp(replayed.last_seq, replayed.last_ts),
        **pick(args, "level", "slot"),
        "groups": [
            pick(history, "group", "window")
            | {
                "now": history.now._asdict(),
                "changes": [
                    stamp(each.seq, each.ts) | pick(each, "index", "type", "why") | each.occupant._asdict()
                    for each in history.changes
                ],
            }
            for history in histories
        ],
    }
