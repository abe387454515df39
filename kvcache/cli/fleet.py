"""``kvcache audit`` of a directory of logs: the workers of a fleet beside each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from events.log.segments import is_log
from kvcache.audit.fleet import Fleet, LeftOut, WorkerAudit, in_processes, on_ray, together
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.cli.audit_json import reasons_json
from kvcache.cli.audit_json import to_json as audit_json
from kvcache.cli.output import Output, end_json
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, share

_MOST_NAMES = 4


@dataclass(slots=True)
class LogsFound:
    """A directory of logs."""

    logs: list[Path]
    left_out: list[LeftOut]
    """What lies in it and may be a log, but cannot be looked into."""


def logs_in(directory: Path) -> LogsFound:
    """The logs that lie directly in a directory; none if it is a log itself, or no directory."""
    found = LogsFound([], [])
    if is_log(directory) or not directory.is_dir():
        return found
    for path in sorted(directory.iterdir()):
        try:
            if is_log(path):
                found.logs.append(path)
        except OSError as error:
            found.left_out.append(LeftOut.of(path, error))
    return found


def run(args: argparse.Namespace, directory: LogsFound, out: Output) -> int:
    """Audit each log, and compare."""
    logs, left_out = directory.logs, list(directory.left_out)
    if args.since is not None or args.until is not None:
        raise UsageError(f"--since and --until are for one log: give that of one worker ({some_of(logs)})")
    with out.progress("reading logs", len(logs)) as update:
        engine = on_ray(logs, args.top) if args.engine == "ray" else in_processes(logs, args.jobs, args.top)
        workers: list[WorkerAudit] = []
        for number, worker in enumerate(engine):
            if isinstance(worker, LeftOut):
                left_out.append(worker)
            else:
                workers.append(worker)
            update(number + 1)
    left_out.sort(key=lambda each: each.path)
    if not workers:
        raise UsageError(f"no log in it can be read: {'; '.join(map(_left_out, left_out))}")
    for each in left_out:
        out.warning(f"left out: {_left_out(each)}")
    fleet = together(workers, args.top)
    for worker in fleet.workers:
        out.note_end(worker.end, args.log / worker.name)
    if args.json:
        out.json(to_json(fleet, left_out))
    else:
        _show(args.log, fleet, out)
    return 0


def _show(directory: Path, fleet: Fleet, out: Output) -> None:
    out.heading(f"{printable(str(directory))}: {count(len(fleet.workers), 'worker')}")
    prompt, elsewhere = int(fleet.reasons.sum()), sum(fleet.elsewhere)
    reused = int(fleet.reasons[: Reason.PARTIAL + 1].sum())
    part, other = share(reused / max(prompt, 1)), share(elsewhere / max(prompt, 1))
    out.facts(
        [
            ("requests", f"{sum(each.audit.requests for each in fleet.workers):,} admitted"),
            ("prompt tokens", f"{prompt:,}, of which {reused:,} were reused: {part}"),
            ("elsewhere", f"{elsewhere:,} were computed while another worker had them cached: {other}"),
            ("blocks", _computed(fleet)),
        ]
    )
    out.line()
    rows = [_row(worker, tokens) for worker, tokens in zip(fleet.workers, fleet.elsewhere, strict=True)]
    columns = ["worker", "requests", "prompt tokens", "reused", "cached elsewhere", "refusals"]
    out.table(columns, rows, right=columns[1:])
    out.line()
    show_reasons("prompt tokens of all", fleet.reasons, out)
    if fleet.spread:
        out.line()
        columns = [
            "prefixes that several workers computed",
            "last block",
            "computed more than once",
            "workers",
        ]
        rows = [
            [
                *(f"{each.first:,}–{each.stop - 1:,}", each.name, f"{each.duplicated_tokens:,}"),
                _first_of(list(map(printable, each.workers))),
            ]
            for each in fleet.spread
        ]
        out.table(columns, rows, right=["computed more than once"])


def show_reasons(title: str, counts: npt.NDArray[np.int64], out: Output) -> None:
    """Prompt tokens by reason, as a table."""
    total = int(counts.sum())
    rows = [
        [IN_WORDS[reason], f"{tokens:,}", share(tokens / total)]
        for reason in Reason
        if (tokens := int(counts[reason]))
    ]
    out.table([title, "count", "share"], rows, right=["count", "share"])


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def some_of(logs: list[Path]) -> str:
    """The first of them by name."""
    return _first_of([printable(path.name) for path in logs])


def _computed(fleet: Fleet) -> str:
    several = sum(blocks for workers, blocks in fleet.computed_on.items() if workers > 1)
    total = sum(fleet.computed_on.values())
    return f"{total:,} different ones of prompts were computed, {several:,} on several workers"


def _row(worker: WorkerAudit, elsewhere: int) -> list[str]:
    audit = worker.audit
    total = max(audit.prompt_tokens, 1)
    return [
        printable(worker.name),
        f"{audit.requests:,}",
        f"{audit.prompt_tokens:,}",
        share(audit.reused / total),
        share(elsewhere / total),
        f"{audit.refusals:,}",
    ]


def _left_out(each: LeftOut) -> str:
    return f"{printable(str(each.path))}: {each.reason}"


def to_json(fleet: Fleet, left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """All of a fleet."""
    return {
        "prompt_tokens": int(fleet.reasons.sum()),
        "reused_tokens": int(fleet.reasons[: Reason.PARTIAL + 1].sum()),
        "elsewhere_tokens": sum(fleet.elsewhere),
        "reasons": reasons_json(fleet.reasons),
        "blocks_computed_on": fleet.computed_on,
        "left_out": [{"name": each.path.name, "reason": each.reason} for each in left_out],
        "prefixes": fleet.spread,
        "workers": [
            {
                "name": worker.name,
                "elsewhere_tokens": tokens,
                "audit": audit_json(worker.audit) | {"end": end_json(worker.end)},
            }
            for worker, tokens in zip(fleet.workers, fleet.elsewhere, strict=True)
        ],
    }
