"""``kvcache explain``: of one request, block by block, what was reused, and why the rest was not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.types import EventBatch, Namespace, RequestId
from kvcache.audit import explanation as ex
from kvcache.audit.explanation import Explanation, Part, Refusal, Stay, explain_request
from kvcache.audit.reasons import IN_WORDS
from kvcache.cli import times
from kvcache.cli.messages import printable
from kvcache.cli.output import Output, count, duration, share
from kvcache.cli.progress import progress
from kvcache.cli.times import Times, iso


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "Explain one request of a log: when it was refused, admitted and ended, and for each part of its prompt "
        "whether it was reused, and if not, why."
    )
    parser.epilog = "docs/audit.md defines the reasons. `kvcache audit` counts them over all requests."
    parser.add_argument("log", type=Path, metavar="LOG", help="a log directory")
    parser.add_argument("--request", metavar="ID", required=True, help="the request, by the engine's id")
    times.add_option(parser)
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once, and tell."""
    first_ts: list[int] = []
    with progress("reading", None, shown=not out.quiet) as update:

        def watched() -> Iterator[EventBatch]:
            for batch in LogReader(args.log):
                if not first_ts:
                    first_ts.append(batch.ts)
                update(batch.seq)
                yield batch

        found = explain_request(watched(), args.request)
    if args.json:
        out.json({"requests": [to_json(each) for each in found]})
        return 0
    for each in found:
        _show(each, Times(args.time, first_ts[0]), out)
    return 0


def _show(found: Explanation, when: Times, out: Output) -> None:
    name = printable(str(found.request_id))
    for refusal in found.refusals:
        _show_refusal(name, refusal, when, out)
    for number, stay in enumerate(found.stays):
        if number or found.refusals:
            out.line()
        _show_stay(name, stay, when, out)


def _show_refusal(name: str, refusal: Refusal, when: Times, out: Output) -> None:
    out.heading(f"request {name}: refused in {_moment(refusal.moment, when)}")
    needed, available = (
        "/".join(f"{blocks:,}" for blocks in each) for each in (refusal.needed, refusal.available)
    )
    holders = ", ".join(f"{printable(str(each.request_id))} ({each.blocks:,})" for each in refusal.holders)
    out.facts(
        [
            ("needed", f"{needed} blocks, {available} could be had"),
            ("running", f"{count(refusal.running, 'request')}; most blocks: {holders or 'none'}"),
        ]
    )


def _show_stay(name: str, stay: Stay, when: Times, out: Output) -> None:
    out.heading(
        f"request {name}: {stay.num_tokens:,} prompt tokens, admitted in {_moment(stay.admitted, when)}"
    )
    facts = [("reused", f"{count(stay.reused, 'token')}: {share(stay.reused / stay.num_tokens)}")]
    if namespace := _namespace(stay.namespace):
        facts.append(("namespace", namespace))
    if stay.computed_again:
        facts.append(
            ("again", f"{count(stay.computed_again, 'token')} that it had computed before it was preempted")
        )
    if stay.ended is None:
        facts.append(("ended", "not in this log"))
    else:
        outcome = f"with {count(stay.tokens_at_end, 'token')}, {stay.computed_at_end:,} computed"
        facts.append(("ended", f"in {_moment(stay.ended, when)}, {outcome}"))
    out.facts(facts)
    out.line()
    several = any(part.window is not None for part in stay.parts)
    rows = [
        [
            _range(part.first_block, part.last_block),
            _range(part.first, part.stop - 1),
            f"{part.stop - part.first:,}",
            *([f"{part.window:,}" if part.window is not None else ""] * several),
            IN_WORDS[part.reason],
            _details(part, stay.admitted, when),
        ]
        for part in stay.parts
    ]
    columns = ["blocks", "tokens", "count", *(["window"] * several), "what", "details"]
    out.table(columns, rows, right=["count", "window"])


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _moment(moment: ex.Moment, when: Times) -> str:
    return f"batch {moment.batch:,} ({when.of(moment.at)})"


def _details(part: Part, now: ex.Moment, when: Times) -> str:
    said = []
    if part.gone is not None:
        said.append(f"{duration(max(0, now.at - part.gone.at) / 1e9)} before, in {_moment(part.gone, when)}")
        if part.gone_for is not None:
            said.append(f"to make room for request {printable(str(part.gone_for))}")
    if part.computed_by is not None:
        said.append(f"by request {printable(str(part.computed_by))}")
    if part.stored is not None and part.stored_by is not None:
        stored = f"stored by request {printable(str(part.stored_by))} in {_moment(part.stored, when)}"
        said.append(f"from slot {part.slot:,} on, {stored}" if part.slot is not None else stored)
    return ", ".join(said)


def _namespace(namespace: Namespace) -> str:
    said = []
    if namespace.lora_id is not None:
        said.append(f"LoRA {namespace.lora_id}")
    if namespace.lora_name is not None:
        said.append(f"LoRA {printable(namespace.lora_name)}")
    if namespace.salt_digest is not None:
        said.append(f"salt {namespace.salt_digest.hex()[:8]}")
    return ", ".join(said)


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
        "recomputed_tokens": stay.computed_again,
        "ended": _moment_json(stay.ended),
        "tokens_at_end": stay.tokens_at_end if stay.ended else None,
        "computed_at_end": stay.computed_at_end if stay.ended else None,
        "parts": [_part_json(each) for each in stay.parts],
    }


def _part_json(part: Part) -> dict[str, Any]:
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
        "slot": part.slot,
        "stored": _moment_json(part.stored),
        "gone": _moment_json(part.gone),
        **request,
    }


def _moment_json(moment: ex.Moment | None) -> Any:
    return None if moment is None else {"seq": moment.batch, "ts": moment.at, "time": iso(moment.at)}
