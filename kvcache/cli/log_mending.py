"""What `kvcache log repair` and `kvcache log salvage` do, and say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from events.errors import LogDamaged
from events.log.recovery import Recovery, repair
from kvcache.cli.messages import printable
from kvcache.cli.output import Output, count, size
from kvcache.cli.progress import progress
from kvcache.keep.salvage import Loss, Salvaged, salvage


def run(args: argparse.Namespace, out: Output) -> None:
    """Do one of them."""
    if args.action == "repair":
        done = repair(args.log, dry_run=args.dry_run)
        if args.json:
            out.json(_repair_json(done, dry_run=args.dry_run))
        else:
            _say_repaired(done, out, dry_run=args.dry_run)
        return
    with progress("copying", None, shown=not out.quiet) as update:
        salvaged = salvage(args.log, args.to, update)
    if args.json:
        out.json(_salvage_json(salvaged))
    else:
        _say_salvaged(args, salvaged, out)


def damage_json(damage: Sequence[LogDamaged]) -> list[dict[str, Any]]:
    """Damaged places, for programs."""
    return [
        {"path": str(each.path), "offset": each.offset, "seq": each.seq, "reason": each.reason}
        for each in damage
    ]


def _repair_json(done: Recovery, *, dry_run: bool) -> dict[str, Any]:
    cut = done.cut
    return {
        "dry_run": dry_run,
        "next_seq": done.chain.seq,
        "cut": None if cut is None else {"path": str(cut.path), "offset": cut.offset, "bytes": cut.bytes},
        "set_aside": [{"path": str(each.path), "bytes": each.bytes} for each in done.aside],
        "unfinished": [path.name for path in done.unfinished],
    }


def _say_repaired(done: Recovery, out: Output, *, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    for path in done.unfinished:
        out.line(f"{path.name} {would}removed: a segment, or a copy of one, that was not whole yet")
    for each in done.aside:
        out.line(f"{each.path.name} {would}moved to quarantine/: {size(each.bytes)} without a whole batch")
    if done.cut is not None:
        cut = done.cut
        where = f"{cut.path.name}, from byte {cut.offset:,}"
        out.line(f"{size(cut.bytes)} {would}moved to quarantine/: a part of a batch ({where})")
    if not (done.unfinished or done.aside or done.cut):
        out.line("nothing to repair")
    out.line(f"the log goes on with batch {done.chain.seq:,}")


def _salvage_json(done: Salvaged) -> dict[str, Any]:
    lost = [
        {"first_seq": each.first, "last_seq": each.last, "readable": len(each.left_out)}
        for each in done.losses
    ]
    return {
        "batches": done.batches,
        "last_seq": done.last_seq,
        "lost": lost,
        "torn": done.torn,
        "damage": damage_json(done.damage),
    }


def _say_salvaged(args: argparse.Namespace, done: Salvaged, out: Output) -> None:
    copied = f"{count(done.batches, 'batch', 'batches')} copied, the last is {done.last_seq:,}"
    out.heading(f"{printable(str(args.to))}: {copied}")
    rows = [("damage", printable(str(each))) for each in done.damage]
    rows += [("lost", _lost(each)) for each in done.losses] or [("lost", "nothing")]
    if done.torn:
        rows.append(("end", "the old log ends with a part of a batch, which is left out"))
    out.facts(rows)


def _lost(loss: Loss) -> str:
    which = (
        f"all from batch {loss.first:,} on"
        if loss.last is None
        else f"batches {loss.first:,} to {loss.last:,}"
    )
    whole = len(loss.left_out)
    return which + (f" ({whole:,} of them whole, but of no use without those before)" if whole else "")
