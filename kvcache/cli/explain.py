"""``kvcache explain``: of one request, block by block, what was reused, and why the rest was not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.types import EventBatch, RequestId
from kvcache.audit import explanation as ex
from kvcache.audit.explanation import (
    Explanation,
    ExplanationView,
    Exported,
    PromptPart,
    Stay,
    explain_request,
    tell,
)
from kvcache.cli import times
from kvcache.cli.log_end import end_json, note_end
from kvcache.cli.output import Output
from kvcache.cli.progress import progress
from kvcache.cli.times import Times, iso


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Explain one request of a log: when it was refused, admitted and ended, and for each part of its prompt "
        "whether it was reused, and if not, why."
    )
    parser.epilog = "`kvcache docs audit` defines the reasons. `kvcache audit` counts them over all requests."
    parser.add_argument("log", type=Path, metavar="LOG", help="a log directory")
    parser.add_argument("--request", metavar="ID", required=True, help="the request, by the engine's id")
    times.add_option(parser)
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once, and tell."""
    first_ts: list[int] = []
    reader = LogReader(args.log)
    with progress("reading", None, shown=not out.quiet) as update:

        def watched() -> Iterator[EventBatch]:
            for batch in reader:
                if not first_ts:
                    first_ts.append(batch.ts if reader.first_ts is None else reader.first_ts)
                update(batch.seq)
                yield batch

        found = explain_request(watched(), args.request)
    note_end(out, reader.end)
    if args.json:
        out.json({"requests": [to_json(each) for each in found], "end": end_json(reader.end)})
        return 0
    for each in found:
        _show(each, Times(args.time, first_ts[0]), out)
    return 0


def _show(found: Explanation, when: Times, out: Output) -> None:
    for number, told in enumerate(tell(found, when.of)):
        if number and told.columns:
            out.line()
        out.heading(told.heading)
        out.facts(told.facts)
        if told.columns:
            out.line()
            out.table(told.columns, told.rows, right=ExplanationView.RIGHT)


def to_json(found: Explanation) -> dict[str, Any]:
    """What is known of a request; tokens and blocks are counted from 0, `stop` is the one behind the last."""
    return {
        "request_id": found.request_id,
        "refusals": [
            {
                **_moment_json(each.moment),
                "needed": each.needed,
                "available": each.available,
                "running": each.running,
                "holders": [
                    {"request_id": other.request_id, "blocks": other.blocks} for other in each.holders
                ],
            }
            for each in found.refusals
        ],
        "exported": [
            {**_moment_json(each.since), "prompt_tokens": each.num_tokens, **_end_json(each)}
            for each in found.exported
        ],
        "stays": [_stay_json(each) for each in found.stays],
    }


def _stay_json(stay: Stay) -> dict[str, Any]:
    salt = stay.namespace.salt_digest
    return {
        **_moment_json(stay.admitted),
        "lora_id": stay.namespace.lora_id,
        "lora_name": stay.namespace.lora_name,
        "salt_digest": salt.hex() if salt is not None else None,
        "prompt_tokens": stay.num_tokens,
        "reused_tokens": stay.reused,
        "not_loaded_tokens": stay.not_loaded,
        "recomputed_tokens": stay.computed_again,
        **_end_json(stay),
        "parts": [_part_json(each) for each in stay.parts],
    }


def _end_json(stay: Stay | Exported) -> dict[str, Any]:
    return {
        "ended": _moment_json(stay.ended),
        "tokens_at_end": stay.tokens_at_end if stay.ended else None,
        "computed_at_end": stay.computed_at_end if stay.ended else None,
    }


def _part_json(part: PromptPart) -> dict[str, Any]:
    request: dict[str, RequestId | None] = {
        "stored_by": part.stored_by,
        "gone_for": part.gone_for,
        "computed_by": part.computed_by,
    }
    return {
        "first": part.first,
        "stop": part.stop,
        "first_block": part.first_block,
        "last_block": part.last_block,
        "reason": part.reason.label,
        "window": part.window,
        "slots": list(part.slots),
        "stored": [{"first_block": each.first_block, **_moment_json(each.moment)} for each in part.stored],
        "gone": _moment_json(part.gone),
        **request,
        "group": part.group,
        "group_kind": part.kind or None,
    }


def _moment_json(moment: ex.LogMoment | None) -> Any:
    return None if moment is None else {"seq": moment.batch, "ts": moment.at, "time": iso(moment.at)}
