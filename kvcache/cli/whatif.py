"""``kvcache whatif``: the requests of a log under other settings and eviction orders, compared with the recording."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from events.units import parse_bytes
from kvcache.audit import open_log
from kvcache.audit.kv_shape import KVShape
from kvcache.audit.memory import cache_bytes
from kvcache.audit.prefill import PrefillCost
from kvcache.cli import messages
from kvcache.cli.config import parse_sets, spelled
from kvcache.cli.costs import Costs
from kvcache.cli.options import add_cost_options, add_shared, option
from kvcache.cli.output import Output, by_level, end_json, pick
from kvcache.cli.process import StopSignals
from kvcache.cli.traces import LOG_OR_TRACE, Served, add_trace, as_log
from kvcache.config import ANY_STOP, KVCacheConfig, look_up, windows_of
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, share, size
from kvcache.whatif.playback import Tally
from kvcache.whatif.policies import BASE, BOUND, HINTED, policy
from kvcache.whatif.trial import (
    POLICY_SETTING,
    Stopped,
    Trial,
    TrialOutcome,
    TrialRow,
    compared,
    first_config,
    play_side_by_side,
    with_bounds,
)

_EPILOG = """\
Every combination of values and policies is replayed: kvcache whatif LOG --set primary_blocks=1000,2000
--set secondary_blocks=0,4000 --policy lru,levels replays eight. Put one number per window in brackets:
--set primary_blocks=[100,50],[200,100]. To compare block sizes, give the capacity in tokens (max_tokens). With the
log's own settings the replay is exact; for logs of other engines (Recorder, vLLM) it follows the rules of this
library's manager.

Policies: lru and levels, the policies of caches (eviction_policy); lfu, by number of uses; arc, which balances blocks
used once and blocks used again; belady and returns, which are clairvoyant; and those of other packages (entry points
kvcache.eviction_orders). They apply to windows with full attention.

`kvcache docs whatif` describes what is replayed, and what happens to requests that do not fit.
"""
_MOST = 256
"""Maximum number of combinations that are played at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Replay the requests of a log or trace under other settings and eviction policies."
    parser.epilog = _EPILOG
    add = partial(option, parser)
    add_shared(parser, "json", log=f"{LOG_OR_TRACE}; a log must contain token ids")
    add(
        "--set FIELD=VALUE,...",
        "setting with the values to try, as in primary_blocks=1000,2000; repeatable",
        action="append",
        default=[],
        dest="sets",
    )
    add(
        "--policy NAME,...",
        "eviction policies to try (default: that of the log); repeatable",
        action="append",
        default=[],
        dest="policies",
    )
    add("--no-bound", f"skip {BOUND}, the bound with which the others are compared")
    add("--jobs N", "number of parallel processes (default: number of cores)")
    add_cost_options(parser)
    add_trace(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Play, compare, print."""
    axes, costs = [alternatives(text) for text in args.sets], Costs.of(args)
    trials, names = combinations(axes, _policies(args.policies)), [axis[0][0] for axis in axes]
    with as_log(args, out) as served:
        config = first_config(served.log)
        if costs.model is not None:
            trials = [_in_blocks(trial, config, costs.model) for trial in trials]
            names = [_IN_BLOCKS.get(name, name) for name in names]
        for trial in trials:
            trial.settings(config)  # errors in settings are reported before a long log is played
        played = trials if args.no_bound else with_bounds(trials)
        with StopSignals() as stop:
            try:
                outcomes = _play(served.log, args, out, stop, played)
            except Stopped:
                return stop.exit_code
        _warn_of_unused_rules(trials, outcomes, out)
        rows, then = compared(played, outcomes, len(trials)), outcomes[0]
        out.note_end(then.end)
        if args.json:
            of = {"log": args.log, "log_id": open_log(served.log).log_id, "end": end_json(then.end)}
            of |= pick(then, passed_over_tokens="passed_over") | {"engine": then.engine or None}
            of |= costs.to_json(then.hours) | served.to_json()
            recorded, *tried = (_row_json(row, costs, then.hours) for row in rows)
            out.json({**of, "recorded": recorded, "trials": tried})
        else:
            _show(args.log, rows, names, costs, served, out)
    return 0


def _warn_of_unused_rules(trials: Sequence[Trial], outcomes: Sequence[TrialOutcome], out: Output) -> None:
    """Warn about stop reasons with a retention rule that no request ended with: most are misspelled."""
    recorded, *tried = outcomes
    ruled = (
        reason
        for trial, outcome in zip(trials, tried, strict=False)
        if "stop_retention" in trial.sets
        for reason in outcome.config.stop_retention
    )
    for reason in dict.fromkeys(ruled):
        if reason != ANY_STOP and reason not in recorded.stops:
            found = [f"{printable(name)} ({number:,})" for name, number in recorded.stops.most_common(_NAMED)]
            there = f"there are: {', '.join(found)}" if found else "none has a stop reason"
            out.warning(f"no request ended with `{printable(reason)}`; {there}")


_NAMED = 10
"""Reasons that a warning names."""
_IN_BLOCKS = {"primary_bytes": "primary_blocks", "host_cache_size": "secondary_blocks"}
"""Settings in bytes, with their equivalents in blocks."""


def _in_blocks(trial: Trial, config: KVCacheConfig, model: KVShape) -> Trial:
    """Return the trial with sizes in bytes converted to blocks of this model, which is not that of the settings."""
    given = [name for name in _IN_BLOCKS if trial.sets.get(name) is not None]
    if given and len(windows_of(config)) > 1:
        raise UsageError(f"--set {given[0]}: not supported with several windows; use {_IN_BLOCKS[given[0]]}")
    size = {name: value for name, value in trial.sets.items() if name == "tokens_per_block"}
    block = model.bytes_per_token * Trial(size).settings(config).tokens_per_block
    blocks = {_IN_BLOCKS[name]: _bytes_in(trial.sets[name], name) // block for name in given}
    return replace(trial, sets={name: trial.sets[name] for name in trial.sets if name not in given} | blocks)


def _bytes_in(given: Any, name: str) -> int:
    try:
        return int(given) if str(given).isdigit() else parse_bytes(str(given))
    except ValueError as error:
        raise UsageError(f"--set {name}: {error}") from None


def _cost(row: TrialRow, costs: Costs, hours: float | None) -> PrefillCost | None:
    """Return the cost of the prefills of a trial, at the times of the log."""
    if costs.pricing is None:
        return None
    tally = row.outcome.tally
    return costs.pricing.of_prompts(tally.lengths[::2], tally.lengths[1::2], hours, again=tally.lengths_again)


def _row_json(row: TrialRow, costs: Costs, hours: float | None) -> dict[str, Any]:
    levels = by_level(cache_bytes(row.outcome.config, costs.model))
    return row.to_json() | {"cache_bytes": levels, "prefill": _cost(row, costs, hours)}


def _play(
    log: Path, args: argparse.Namespace, out: Output, stop: StopSignals, trials: Sequence[Trial]
) -> list[TrialOutcome]:
    # Warnings at a cache's creation would be repeated for each.
    prepare = partial(messages.configure_diagnostics, as_json=args.log_json, verbose=False, quiet=True)
    prepare()
    with out.progress("replaying batches") as update:
        return play_side_by_side(
            log,
            trials,
            args.jobs or os.cpu_count() or 1,
            stop=stop.is_set,
            progress=update,
            prepare=prepare,
        )


# -- combinations


def alternatives(text: str) -> list[tuple[str, str]]:
    """Return the values of one ``--set``, each with its field; commas inside brackets and braces belong to a value."""
    name, equals, values = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--set {text}: write FIELD=VALUE,VALUE, as in --set primary_blocks=1000,2000")
    found, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [(name, value.strip()) for value in found]


def combinations(axes: Sequence[Sequence[tuple[str, str]]], policies: Sequence[str | None]) -> list[Trial]:
    """Return a trial for each choice of a value from each axis, and each policy. Raises `UsageError` above `_MOST`."""
    names = [axis[0][0] for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--set {name} is given twice: give all values at once, separated by commas")
    if POLICY_SETTING in names and policies != [None]:
        raise UsageError(f"--policy and --set {POLICY_SETTING} exclude each other: give one of them")
    chosen = [parse_sets([f"{name}={value}" for name, value in choice]) for choice in product(*axes)]
    trials = [Trial(sets, name) for sets in chosen for name in policies]
    if len(trials) > _MOST:
        raise UsageError(f"{len(trials):,} combinations are too many: the maximum is {_MOST}")
    return trials


def _policies(given: Sequence[str]) -> list[str | None]:
    """Return the policies to play, each once, or that of the settings (None); raises `UnknownPolicy`."""
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        policy(name)
    return list(dict.fromkeys(names)) or [None]


# -- results

_NUMBERS: dict[str, Callable[[Tally], int]] = {
    "computed": lambda tally: tally.computed_tokens,
    "secondary": lambda tally: tally.reused_tokens_secondary,
    "waited": lambda tally: tally.waited,
    "preempted": lambda tally: tally.preempted,
    "cut short": lambda tally: tally.cut_short,
    "too long": lambda tally: tally.too_long,
    "unserved": lambda tally: tally.unserved,
    "offloaded": lambda tally: tally.blocks_offloaded,
    "onboarded": lambda tally: tally.blocks_onboarded,
    "removed": lambda tally: tally.blocks_removed_primary + tally.blocks_removed_secondary,
}
"""Columns that are shown if any of their values is not 0."""


def _show(
    log: Path, rows: Sequence[TrialRow], fields: Sequence[str], costs: Costs, served: Served, out: Output
) -> None:
    then, hours = rows[0].outcome.tally, rows[0].outcome.hours
    out.heading(
        f"{printable(str(log))}: {count(then.requests, 'request')}, {count(then.prompt_tokens, 'prompt token')}"
    )
    out.facts([*served.facts(), *costs.prefill_facts(), *costs.model_facts()])
    shown = [name for name, of in _NUMBERS.items() if any(of(row.outcome.tally) for row in rows)]
    bounded = any(row.of_bound is not None for row in rows)
    gaps = [row.of_gap for row in rows if row.trial and row.trial.policy == HINTED and row.of_gap is not None]
    table = [
        {"": "recorded" if row.trial is None else row.policy}
        | {printable(name): printable(_setting(row, name)) for name in fields}
        | _bytes_cell(row, costs)
        | {"reused": row.outcome.tally.reused_tokens, "token hit rate": share(row.outcome.tally.hit_rate)}
        | ({f"of {BOUND}": _part(row.of_bound)} if bounded else {})
        | ({"of gap": _part(row.of_gap)} if gaps else {})
        | {name: _NUMBERS[name](row.outcome.tally) for name in shown}
        | dict(costs.cost_cells(_cost(row, costs, hours)))
        for row in rows
    ]
    out.table(table, right=list(table[0])[1:])
    out.line()
    out.line(
        "reused, computed, secondary: prompt tokens; offloaded, onboarded, removed (evicted for good): blocks"
    )
    out.line("token hit rate: reused fraction of all prompt tokens" + _not_served(rows))
    if costs.pricing is not None:
        out.line(costs.cells_in_words())
    for line in _of_engine(rows[0].outcome):
        out.line(line)
    if gaps:
        out.line(_worth_of_hints(gaps))


def _bytes_cell(row: TrialRow, costs: Costs) -> dict[str, str]:
    """Format the memory of both levels of a cache, if a model is known."""
    levels = cache_bytes(row.outcome.config, costs.model)
    return {} if levels is None else {"bytes": " + ".join(size(each) for each in levels if each)}


def _setting(row: TrialRow, name: str) -> str:
    value = look_up(row.outcome.config.model_dump(), name)
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return spelled(value)
    return "-" if value is None or value is ... else str(value)


def _part(part: float | None) -> str:
    return "-" if part is None else share(part)


def _not_served(rows: Sequence[TrialRow]) -> str:
    if not any(row.outcome.tally.unserved_tokens for row in rows):
        return ""
    return "; tokens of requests that are too long for the cache, or unserved, count as not reused"


def _of_engine(then: TrialOutcome) -> Iterator[str]:
    """Yield differences between the recording and the trials if another engine decided."""
    if not then.engine:
        return
    yield (
        f"recorded: decisions of {printable(then.engine)}; the other rows follow the rules of this library's manager "
        "(`kvcache docs whatif` describes the differences)"
    )
    if then.passed_over:
        yield (
            f"{count(then.passed_over, 'token')} of prompts were cached but not reused because of a rule of the engine "
            "that the other rows do not follow (`kvcache audit`: cached, but not reused by the engine)"
        )


def _worth_of_hints(gaps: Sequence[float]) -> str:
    """Format the gaps that hints would close; several belong to several settings."""
    least, most = share(min(gaps)), share(max(gaps))
    closed = least if least == most else f"{least} to {most}"
    return (
        f"knowing only which blocks return ({HINTED}) closes {closed} of the gap between {BASE} and {BOUND}: "
        "about the maximum that hints of an application can gain"
    )
