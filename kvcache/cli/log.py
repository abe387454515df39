"""``kvcache log``: a log's files: their integrity, repair, and retention."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from events.errors import NotALog
from events.log.leases import leased
from events.log.recovery import repair
from events.log.retention import Limits, LogParts
from events.log.segments import Segment, is_closed, is_log, segment_paths
from events.units import parse_bytes
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output, end_json, pick
from kvcache.errors import InternalError, UsageError
from kvcache.maintenance.compress import compress
from kvcache.maintenance.prune import prune
from kvcache.maintenance.salvage import Loss, salvage
from kvcache.maintenance.verify import verify
from kvcache.phrases import batches, count, describe_end, iso, printable, size

_ACTIONS = {
    "info": "List segments and snapshots, their sizes, and what followers still need. Reads only the headers.",
    "verify": "Read and check everything: frames, events, checkpoints, and each snapshot against the replayed state.",
    "repair": "Move the remains of an interrupted write to quarantine/, as a writer does on opening the log. Refuses a "
    "damaged log.",
    "salvage": "Copy what can be read of a damaged log into a new one, and report what is lost.",
    "compact": "Keep a snapshot and what follows it; the same as prune --retain-segments 1.",
    "compress": "Compress uncompressed segments, such as those of earlier versions, except the last one. Safe while a "
    "writer is active. Engines write compressed segments by default (log.compression).",
    "prune": "Make the snapshots that are due, and remove what exceeds the limits. Safe while a writer is active. "
    "Engines prune their logs with the settings log.retain_bytes, log.retain_seconds and log.retain_segments.",
}
"""Actions, with their purpose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Inspect, verify, repair, compress or prune the files of a log."
    parser.epilog = "\n\n".join(f"{action}: {what}" for action, what in _ACTIONS.items())
    parser.add_argument("action", choices=[*_ACTIONS], metavar="|".join(_ACTIONS), help="action, see below")
    add_shared(parser, "log", "json")
    add = partial(option, parser)
    add(
        "--retain-bytes SIZE",
        "for prune: maximum size of the log with its snapshots, as in 8GiB",
        type=_bytes,
    )
    add(
        "--retain-seconds SECONDS",
        "for prune: maximum age of segments, relative to the start of the newest one, by the log's clock",
    )
    add("--retain-segments N", "for prune: maximum number of segments")
    add("--dry-run", "for repair: print what would be done, without doing it")
    add("--to DIR", "for salvage: directory of the new log")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace, out: Output) -> int:
    """Run one action."""
    if not is_log(args.log):
        raise NotALog(args.log)
    limits = Limits(args.retain_bytes, args.retain_seconds, args.retain_segments)
    if limits and args.action != "prune":
        raise UsageError(
            "--retain-bytes, --retain-seconds and --retain-segments are only valid with `kvcache log prune`"
        )
    if args.dry_run and args.action != "repair":
        raise UsageError("--dry-run is only valid with `kvcache log repair`")
    if (args.to is not None) != (args.action == "salvage"):
        raise UsageError("--to DIR is required for `kvcache log salvage`, and only valid there")
    if args.action in ("prune", "compact"):
        _prune(args, Limits(segments=1) if args.action == "compact" else limits, out)
    else:
        _DO[args.action](args, out)
    return 0


def _info(args: argparse.Namespace, out: Output) -> None:
    kept, paths = LogParts(args.log), segment_paths(args.log)
    found = _files(kept) | _identity(args.log, paths) | {"needed_from": leased(args.log)}
    if args.json:
        out.json(found)
        return
    out.heading(f"{printable(str(args.log))}: {size(found['bytes'])} in {count(len(paths), 'segment')}")
    files = [
        ("compressed" if part.is_compressed else "segment", part.first, part.bytes, part.ts)
        for part in kept.parts
    ]
    files += [("snapshot", each.seq, each.size, each.about.latest_ts) for each in kept.snapshots]
    files.sort(key=lambda file: file[1])
    rows = [
        {"file": kind, "batch": seq, "size": size(room), "time": iso(ts)} for kind, seq, room, ts in files
    ]
    out.table(rows, right=["size"])
    out.line()
    needed = found["needed_from"]
    out.facts(
        [
            ("log", f"{found['log_id'] or 'none yet'}, epoch {found['epoch']}"),
            (
                "end",
                "closed" if found["closed"] else "open: a writer is active, or was killed",
            ),
            ("followers", "none" if needed is None else f"need batches from {needed:,} on"),
        ]
    )


def _files(kept: LogParts) -> dict[str, Any]:
    segments = [
        pick(part, "bytes", "ts", first_seq="first", compressed="is_compressed") for part in kept.parts
    ]
    snapshots = [pick(each, "seq", bytes="size") for each in kept.snapshots]
    total = sum(each["bytes"] for each in segments + snapshots)
    return {"bytes": total, "segments": segments, "snapshots": snapshots}


def _identity(log: Path, paths: list[Path]) -> dict[str, Any]:
    header, closed = None, False
    for path in paths[-1:]:
        with Segment(path) as segment:
            header = segment.header()
        closed = is_closed(path)
    return {
        "log_id": None if header is None else header.log_id.hex(),
        "epoch": None if header is None else header.epoch,
        "closed": closed,
    }


def _verify(args: argparse.Namespace, out: Output) -> None:
    with out.progress("reading") as update:
        found = verify(args.log, update)
    out.note_end(found.end)
    if args.json:
        counted = pick(found, "batches", "events", "damage", "problems", checkpoints_verified="checkpoints")
        more = {
            "snapshots_verified": found.snapshots,
            "unused_snapshots": [path.name for path in found.unused],
        }
        out.json(counted | more | {"end": end_json(found.end)})
    else:
        out.heading(f"{printable(str(args.log))}: {count(found.batches, 'batch')} read")
        rows = [("events", f"{found.events:,}"), ("checkpoints", f"{found.checkpoints:,} agree")]
        rows.append(("snapshots", f"{found.snapshots:,} agree with the log"))
        rows += [("unused", path.name) for path in found.unused]
        rows += [("damage", printable(str(each))) for each in found.damage]
        rows += [("problem", printable(problem)) for problem in found.problems]
        if found.end is not None:
            rows.append(("end of the log", describe_end(found.end)))
        out.facts(rows)
    if problems := [*map(str, found.damage), *found.problems]:
        raise InternalError(f"{count(len(problems), 'problem')}: {'; '.join(problems[:3])}")


def _compress(args: argparse.Namespace, out: Output) -> None:
    with out.progress("compressing") as update:
        done = compress(args.log, update)
    if args.json:
        out.json(pick(done, "bytes_before", "bytes", "left", compressed="segments"))
        return
    what = count(done.segments, "segment")
    out.line(f"compressed  {what}, {size(done.bytes_before)} to {size(done.bytes)}")
    if done.left:
        out.line(f"left        {count(done.left, 'segment')}, damaged: `kvcache log verify` shows where")


def _prune(args: argparse.Namespace, limits: Limits, out: Output) -> None:
    with out.progress("folding") as update:
        done = prune(args.log, limits, update)
    removed = done.removed
    if args.json:
        made = [pick(each, "seq", bytes="size") for each in done.made]
        numbers = pick(removed, "segments", "snapshots", "bytes")
        out.json({"made": made, "removed": numbers, "kept": _files(done.kept)})
        return
    for each in done.made:
        out.line(f"made      the snapshot of batch {each.seq:,}, {size(each.size)}")
    files = f"{count(removed.segments, 'segment')}, {count(removed.snapshots, 'snapshot')}"
    out.line(f"removed   {files}, {size(removed.bytes)}")
    kept = _files(done.kept)
    files = f"{count(len(kept['segments']), 'segment')}, {count(len(kept['snapshots']), 'snapshot')}"
    out.line(f"kept      {files}, {size(kept['bytes'])}")


def _repair(args: argparse.Namespace, out: Output) -> None:
    done = repair(args.log, dry_run=args.dry_run)
    if args.json:
        cut = done.cut and pick(done.cut, "path", "offset", "bytes")
        found = {"dry_run": args.dry_run, "next_seq": done.chain.seq, "cut": cut}
        found["set_aside"] = [pick(each, "path", "bytes") for each in done.quarantined]
        out.json(found | {"unfinished": [path.name for path in done.unfinished]})
        return
    would = "would be " if args.dry_run else ""
    for path in done.unfinished:
        out.line(f"{path.name} {would}removed: an incomplete segment, or copy of one")
    for each in done.quarantined:
        out.line(f"{each.path.name} {would}moved to quarantine/: {size(each.bytes)} without a complete batch")
    if done.cut is not None:
        cut = done.cut
        where = f"{cut.path.name}, from byte {cut.offset:,}"
        out.line(f"{size(cut.bytes)} {would}moved to quarantine/: an incomplete batch ({where})")
    if not (done.unfinished or done.quarantined or done.cut):
        out.line("nothing to repair")
    out.line(f"the log continues with batch {done.chain.seq:,}")


def _salvage(args: argparse.Namespace, out: Output) -> None:
    with out.progress("copying") as update:
        done = salvage(args.log, args.to, update)
    if args.json:
        lost = [
            pick(each, first_seq="first", last_seq="last") | {"readable": len(each.left_out)}
            for each in done.losses
        ]
        out.json(pick(done, "batches", "last_seq", "torn", "damage") | {"lost": lost})
        return
    copied = f"{count(done.batches, 'batch')} copied, up to {done.last_seq:,}"
    out.heading(f"{printable(str(args.to))}: {copied}")
    rows = [("damage", printable(str(each))) for each in done.damage]
    rows += [("lost", _lost(each)) for each in done.losses] or [("lost", "nothing")]
    if done.torn:
        rows.append(("end", "the old log ends with an incomplete batch, which was left out"))
    out.facts(rows)


def _lost(loss: Loss) -> str:
    which = f"all from batch {loss.first:,} on" if loss.last is None else batches(loss.first, loss.last)
    whole = len(loss.left_out)
    return which + (f" ({whole:,} of them intact, but unusable without the previous ones)" if whole else "")


_DO = {"info": _info, "verify": _verify, "repair": _repair, "salvage": _salvage, "compress": _compress}
