"""``kvcache explain``: reuse of one request, block by block, and the reasons for the rest."""

from __future__ import annotations

import argparse
from typing import Any

from events.log import LogReader
from kvcache.audit.explanation import (
    Explanation,
    ExplanationView,
    Exported,
    LogMoment,
    PromptPart,
    Residency,
    explain_request,
    views_of,
)
from kvcache.audit.reasons import Reason
from kvcache.audit.turns import KINDS_IN_WORDS, Turn, turns_of
from kvcache.cli.audit import namespace_json, reasons_json
from kvcache.cli.options import add_shared, option
from kvcache.cli.output import Output, end_json, pick, stamp
from kvcache.cli.times import Times, UpTo
from kvcache.cli.traces import LOG_OR_TRACE, add_trace, as_log
from kvcache.phrases import count, printable, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Explain a request of a log or trace: when it was refused, admitted and ended, and for each part of its prompt "
        "whether it was reused and, if not, why. With --session, show how each prompt of a session continues the "
        "previous one."
    )
    parser.epilog = "`kvcache docs audit` defines the reasons. `kvcache audit` counts them over all requests."
    add_shared(parser, "time", "json", log=LOG_OR_TRACE)
    which = parser.add_mutually_exclusive_group(required=True)
    option(which, "--request ID", "request to explain, by the engine's id")
    option(which, "--session ID", "session whose turns to show")
    add_trace(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Read the log once (for a trace, that of the cache that served it), and print the explanation."""
    with as_log(args, out) as served:
        batches = UpTo(reader := LogReader(served.log), None)
        turns = [] if args.session is None else turns_of(out.watched(batches), args.session)
        found = [] if args.request is None else explain_request(out.watched(batches), args.request)
        out.note_end(reader.end)
        when = Times(args.time, batches.first_ts)
        if args.json:
            of_session = {"session": args.session, "turns": list(map(_turn_json, turns))}
            said = {"requests": list(map(to_json, found))} if args.session is None else of_session
            out.json(said | {"end": end_json(reader.end)})
        elif args.session is not None:
            _show_turns(turns, when, out)
        else:
            for each in found:
                _show(each, when, out)
    return 0


def _show(found: Explanation, when: Times, out: Output) -> None:
    for number, view in enumerate(views_of(found, when.of)):
        if number and view.columns:
            out.line()
        out.heading(view.heading)
        out.facts(view.facts)
        rows = [dict(zip(view.columns, row, strict=True)) for row in view.rows]
        out.table(rows, right=ExplanationView.RIGHT, gap=True)


def _show_turns(turns: list[Turn], when: Times, out: Output) -> None:
    admissions = [each.admission for each in turns]
    prompts, reused = sum(each.num_tokens for each in admissions), sum(each.reused for each in admissions)
    out.heading(
        f"session {printable(str(admissions[0].origin.session))}: {count(turns[-1].number, 'turn')}, "
        f"{prompts:,} prompt tokens, of which {reused:,} were reused: {share(reused / prompts)}"
    )
    agents = [printable((each.origin.labels or {}).get("agent", "")) for each in admissions]
    rows = [
        {
            "turn": each.number,
            "request": printable(str(admission.request_id)),
            **({"agent": agent} if any(agents) else {}),
            "admitted": when.of(admission.at),
            "prompt": admission.num_tokens,
            "reused": share(admission.reused / admission.num_tokens),
            "computed again": int(admission.counts[Reason.COMPUTING_AGAIN : Reason.RESTARTED + 1].sum()),
            "what": KINDS_IN_WORDS[each.kind],
            "differs at token": "" if each.differs_at is None else f"{each.differs_at:,}",
            "block": "" if each.block is None else f"{each.block:,}",
            "": "in its answer" if each.differs_in_output else "",
        }
        for each, admission, agent in zip(turns, admissions, agents, strict=True)
    ]
    out.table(rows, right=["reused", "differs at token", "block"], gap=True)


def _turn_json(turn: Turn) -> dict[str, Any]:
    admission = turn.admission
    return {
        **pick(turn, "number", "kind", "before", "before_tokens", "common_tokens", "differs_at", "block"),
        **pick(admission, "request_id"),
        **_moment_json(LogMoment(admission.batch, admission.at)),
        **namespace_json(admission.namespace),
        **pick(admission.origin, "labels"),
        **pick(admission, prompt_tokens="num_tokens", reused_tokens="reused"),
        "reasons": reasons_json(admission.counts),
    }


def to_json(found: Explanation) -> dict[str, Any]:
    """Return what is known of a request; tokens and blocks are counted from 0, `stop` is the one after the last."""
    return {
        "request_id": found.request_id,
        "refusals": [
            _moment_json(each.moment) | pick(each, "needed", "available", "running", "holders")
            for each in found.refusals
        ],
        "exported": [
            {**_moment_json(each.since), "prompt_tokens": each.num_tokens, **_end_json(each)}
            for each in found.exported
        ],
        "stays": [_stay_json(each) for each in found.stays],
    }


def _stay_json(stay: Residency) -> dict[str, Any]:
    return {
        **_moment_json(stay.admitted),
        **namespace_json(stay.namespace),
        **pick(stay.origin, "session", "labels"),
        **pick(stay, prompt_tokens="num_tokens", reused_tokens="reused", not_loaded_tokens="not_loaded"),
        **pick(stay, recomputed_tokens="computed_again"),
        **_end_json(stay),
        "parts": [_part_json(each) for each in stay.parts],
    }


def _end_json(stay: Residency | Exported) -> dict[str, Any]:
    if stay.ended is None:
        return dict.fromkeys(("ended", "tokens_at_end", "computed_at_end"))
    return {"ended": _moment_json(stay.ended)} | pick(stay, "tokens_at_end", "computed_at_end")


def _part_json(part: PromptPart) -> dict[str, Any]:
    return {
        **pick(part, "first", "stop", "first_block", "last_block", "window", "slots", "group"),
        **pick(part, "stored_by", "gone_for", "computed_by"),
        "reason": part.reason.label,
        "stored": [pick(each, "first_block") | _moment_json(each.moment) for each in part.stored],
        "gone": None if part.gone is None else _moment_json(part.gone),
        "group_kind": part.kind or None,
    }


def _moment_json(moment: LogMoment) -> dict[str, Any]:
    return stamp(moment.batch, moment.at)
