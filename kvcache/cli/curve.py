"""``kvcache curve``: reuse of a log's or trace's prompts in a cache of any size."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from events.structs import LEVEL_NAMES
from kvcache.audit import open_log
from kvcache.audit.block_cache import COMPILED
from kvcache.audit.curve import (
    SAMPLES,
    TIMEOUTS,
    CacheSize,
    CurveRecorder,
    HitCurve,
    LoggedPrompts,
    SpanAges,
    SpanDistances,
    TimeoutCurve,
    best_hits,
    enough_for,
)
from kvcache.audit.memory import names_model
from kvcache.audit.policies import POLICIES, Policy, RequestRecorder
from kvcache.audit.prefill import PrefillCost
from kvcache.cli.costs import Costs
from kvcache.cli.options import (
    TOKENS_PER_BLOCK,
    SizeInBytes,
    add_cost_options,
    add_shared,
    cache_size,
    number,
    option,
    seekable,
)
from kvcache.cli.output import Facts, Output, by_level, end_json, pick
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.traces import reported_in_words, reported_json
from kvcache.errors import UsageError
from kvcache.phrases import count, printable, share, size, span
from kvcache.workload.reported import ReportedReuse
from kvcache.workload.traces import TracePrompts

_FEWEST = 8
"""Minimum number of blocks of a sample for a meaningful value."""
_ROWS = 13
"""Maximum number of powers of two in the table: the largest ones that matter."""
_BAR = 30
"""Width in characters of a hit rate of 100 %."""


@dataclass(frozen=True, slots=True)
class CurveFound:
    """Results of the command."""

    prompts: LoggedPrompts | TracePrompts
    curve: HitCurve
    bounds: dict[int, int]
    """Maximum hits of any eviction order, by the sizes for which that was requested."""
    asked: tuple[int, ...]
    """Further requested sizes, in blocks."""
    costs: Costs
    spans: SpanDistances | None
    """Cache sizes at which spans hit; None if no prefill formula is known."""
    ages: SpanAges | None
    """Idle times of spans; None if no prefill formula is known."""
    timeouts: TimeoutCurve
    policies: dict[int, dict[str, int]]
    """Hits of other eviction orders, by size and name; empty if not requested."""

    @property
    def logged(self) -> LoggedPrompts | None:
        """The prompts, if a cache has logged them."""
        return self.prompts if isinstance(self.prompts, LoggedPrompts) else None

    @property
    def today(self) -> CacheSize:
        """Size of the cache that logged the prompts; a trace has none."""
        return CacheSize(0, 0, 0) if self.logged is None else self.logged.size

    @property
    def bytes_per_block(self) -> int | None:
        """Bytes of a block; None if no model is known."""
        return bytes_per_block(self.prompts, self.costs)

    def cost(self, blocks: int) -> PrefillCost | None:
        """Return the cost of the prefills with a cache of `blocks` blocks; None if no formula is known."""
        return None if self.spans is None else self._cost(self.spans.hits(blocks))

    def cost_by_timeout(self, seconds: float | None) -> PrefillCost | None:
        """Return the cost of the prefills with an idle timeout in an unbounded cache; None: no timeout."""
        timeout = math.inf if seconds is None else seconds
        return None if self.ages is None else self._cost(self.ages.hits(timeout))

    def _cost(self, hits: npt.NDArray[np.int64]) -> PrefillCost | None:
        if self.costs.pricing is None:
            return None
        reused = hits * self.prompts.tokens_per_block
        return self.costs.pricing.of_prompts(self.prompts.lengths, reused, self.prompts.hours)


def bytes_per_block(prompts: LoggedPrompts | TracePrompts, costs: Costs) -> int | None:
    """Return the bytes of a block's K and V, by the given model or else by the log's; None if no model is known."""
    if costs.model is not None:
        return costs.model.bytes_per_token * prompts.tokens_per_block
    if isinstance(prompts, LoggedPrompts) and names_model(prompts.config):
        return prompts.size.bytes_per_block
    return None


class PolicyTrials:
    """Replay of the requested policies, once all prompts are known. Raises `UsageError` for incompatible options."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.policy and args.sample < 1:
            raise UsageError("--policy needs all blocks, not samples: omit --sample")
        if args.policy and args.ttl:
            raise UsageError("--ttl cannot be combined with --policy: it assumes an unbounded cache")
        if args.hold is not None and not args.policy:
            raise UsageError("--hold requires --policy")
        if args.hold is not None and args.bound:
            raise UsageError(
                "--bound cannot be combined with --hold: it assumes that requests hold no blocks"
            )
        self.policies: tuple[Policy, ...] = args.policy
        self.hold: float | None = args.hold
        """Tokens per second that a request generates while it holds its blocks; None: requests hold nothing."""
        self.recorder = RequestRecorder()

    def add(self, prompts: LoggedPrompts | TracePrompts, blocks: Sequence[int]) -> None:
        """Add the prompt iterated over last. Raises `UsageError` for one of a log, if it is to be held."""
        if not self.policies:
            return
        if isinstance(prompts, LoggedPrompts):
            if self.hold is not None:
                raise UsageError("--hold works with traces only: give a trace, or omit it")
            self.recorder.add(blocks, arrival=prompts.at / 1e9)
        elif (request := prompts.request) is not None:
            held = request.output_length / self.hold if self.hold else 0.0
            self.recorder.add(blocks, arrival=prompts.at / 1e9, held=held, stop=request.stop)

    def play(self, sizes: Iterable[int], tokens_per_block: int, out: Output) -> dict[int, dict[str, int]]:
        """Return hits by size and policy. Raises `UsageError` if a policy needs data that the prompts lack."""
        if not self.policies:
            return {}
        if not COMPILED:
            out.warning("this is a hundred times slower without numba: pip install 'kvcache[simulate]'")
        workload = self.recorder.workload(tokens_per_block)
        pairs = [(blocks, policy) for blocks in sorted(set(sizes)) for policy in self.policies]
        hits: dict[int, dict[str, int]] = {}
        with out.progress("playing", len(pairs)) as update:
            for done, (blocks, policy) in enumerate(pairs):
                hits.setdefault(blocks, {})[policy.name] = int(policy.hits(workload, blocks).sum())
                update(done + 1)
        return hits


MOST_BLOCKS = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show how many blocks the prompts of a log or trace would reuse as a function of cache size, if they ran one "
        "after the other with LRU eviction. Sizes are those of both levels together."
    )
    parser.epilog = "`kvcache docs curve` explains what is counted, and how a running cache differs."
    add_shared(
        parser,
        "json",
        "trace_block_size",
        "tokenizer",
        log="a log directory, or a trace of requests (- for stdin)",
        tokens_per_block=f"tokens per block, for a trace with tokens (default: {TOKENS_PER_BLOCK})",
    )
    option(
        parser,
        "--sample RATE",
        f"estimate from {SAMPLES} samples with this fraction of the blocks each, as in 0.01, to use less memory",
        type=number("a number above 0 and at most 1", lambda rate: 0 < rate <= 1),
        default=1.0,
    )
    option(
        parser,
        "--bound SIZES",
        "sizes in blocks at which to show the maximum of any eviction policy, as in 1000,2000",
        type=_sizes,
        default=(),
    )
    option(
        parser,
        "--sizes SIZES",
        "further sizes for the table, in blocks, or in bytes if a model is known, as in 8GiB (also valid for --bound)",
        type=_sizes,
        default=(),
    )
    option(
        parser,
        "--ttl",
        "show reuse as a function of an idle timeout, in an unbounded cache, instead of cache size",
    )
    _add_policy_options(parser)
    add_cost_options(parser)


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for eviction orders."""
    option(
        parser,
        "--policy NAMES",
        f"eviction policies to compare at --sizes, or at all sizes of the table: {', '.join(POLICIES)}; a number "
        "after a colon sets a parameter, as in stop:300",
        type=_policies,
        default=(),
    )
    option(
        parser,
        "--hold SPEED",
        "with --policy and a trace: tokens per second that requests generate, holding their blocks meanwhile",
        type=number("a number of tokens per second", lambda speed: 0 < speed < 1e9),
    )


def _policies(text: str) -> tuple[Policy, ...]:
    names = dict.fromkeys(part.strip() for part in text.split(","))
    try:
        return tuple(map(Policy.named, names))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace, out: Output) -> int:
    """Read, count, print."""
    costs = Costs.of(args)
    if costs.pricing is not None and args.sample < 1:
        raise UsageError("--prefill needs all blocks, not samples: omit --sample")
    recorder, trials = CurveRecorder(args.sample), PolicyTrials(args)
    workload = recorder.reuses if args.bound else None  # raises at once for samples
    reported = ReportedReuse()
    with leaving_at_sigterm(), out.progress("reading") as update, seekable(args.log) as source:
        prompts = _prompts(args, source, update, reported)
        for blocks in prompts:
            recorder.add(blocks, prompts.at)
            trials.add(prompts, blocks)
    bounded, asked = (_in_blocks(sizes, prompts, costs) for sizes in (args.bound, args.sizes))
    bounds = {} if workload is None else {each: best_hits(workload, each) for each in bounded}
    priced = None if costs.pricing is None else recorder.reuses
    spans, ages = (None, None) if priced is None else (SpanDistances.of(priced), SpanAges.of(priced))
    timeouts = TimeoutCurve.of(recorder)
    found = CurveFound(prompts, recorder.curve(), bounds, asked, costs, spans, ages, timeouts, {})
    sizes = [*found.asked, *found.bounds] or _table_sizes(found)
    found.policies.update(trials.play(sizes, prompts.tokens_per_block, out))
    if found.curve.is_vague:
        least, most = min(found.curve.sampled_blocks), max(found.curve.sampled_blocks)
        few = count(most, "block") if least == most else f"{least:,} to {most:,} blocks"
        enough = enough_for(found.curve.distinct_blocks)
        remedy = f"give --sample {enough:g} or more" if enough < 1 else "omit --sample"
        why = f"the samples have only {few} each, too few for accurate hit rates, a knee or standard errors"
        out.warning(f"{why}; {remedy}")
    if reported.doubt is not None:
        out.warning(reported.doubt)
    if found.logged is not None:
        out.note_end(found.logged.reader.end)
    if args.json:
        of_trace = {"trace": str(args.log), **reported_json(reported, played=False)}
        of = of_trace if found.logged is None else {"log_id": open_log(args.log).log_id}
        out.json({**of, **to_json(found)})
    else:
        (_show_timeouts if args.ttl else _show)(args.log, found, out)
        if (said := reported_in_words(reported)) is not None:
            out.line(said)
    return 0


def _prompts(
    args: argparse.Namespace, source: Path, update: Callable[[int], None], reported: ReportedReuse
) -> LoggedPrompts | TracePrompts:
    if not source.exists():
        raise UsageError(f"{source} does not exist: give a log directory, or a trace (`kvcache docs traces`)")
    if not source.is_file():
        of_traces = ("trace_block_size", "tokenizer", "tokens_per_block")
        if given := [name for name in of_traces if getattr(args, name) is not None]:
            raise UsageError(
                f"--{given[0].replace('_', '-')} is only valid for traces, and {source} is a log"
            )
        return LoggedPrompts(source, update)
    return trace_prompts(args, source, progress=update, watch=reported.see)


def trace_prompts(args: argparse.Namespace, source: Path, **called: Any) -> TracePrompts:
    """Open the prompts of the trace `args.log`, which is read at `source`, with the given options."""
    return TracePrompts(
        source,
        block_tokens=args.trace_block_size,
        tokenizer=args.tokenizer,
        tokens_per_block=args.tokens_per_block or TOKENS_PER_BLOCK,
        shown=str(args.log),
        **called,
    )


def to_json(found: CurveFound) -> dict[str, Any]:
    """Return the curve, and the position of the current cache on it."""
    prompts, curve = found.prompts, found.curve
    return {
        **(
            {"prompts": prompts.requests}
            if isinstance(prompts, TracePrompts)
            else _logged_json(prompts, curve)
        ),
        **pick(prompts, "tokens_per_block"),
        **pick(curve, "block_requests", "distinct_blocks", "knee", sample_rate="rate"),
        **found.costs.to_json(prompts.hours),
        "sampled_blocks": curve.sampled_blocks if curve.rate < 1 else None,
        "sizes": [
            {
                "blocks": blocks,
                "hits": curve.hits(blocks),
                "level_hits": by_level(_levels(found, blocks)),
                "hit_rate": curve.hit_rate(blocks),
                "standard_error": curve.error(blocks),
                "best_hits": found.bounds.get(blocks),
                "policies": [
                    {"name": name, "hits": hits} for name, hits in found.policies.get(blocks, {}).items()
                ],
                "bytes": None if found.bytes_per_block is None else blocks * found.bytes_per_block,
                "prefill": found.cost(blocks),
            }
            for blocks in _table_sizes(found)
        ],
        "timeouts": [
            {"seconds": seconds, "hits": hits, "hit_rate": rate, "lost_tokens": lost}
            | {"prefill": found.cost_by_timeout(seconds)}
            for seconds, hits, rate, lost in _timeouts(found)
        ],
        "covered_seconds": found.timeouts.seconds,
    }


def _logged_json(prompts: LoggedPrompts, curve: HitCurve) -> dict[str, Any]:
    today = prompts.size
    return {
        **pick(prompts, "window", seq="last_seq", prompts="admissions"),
        **pick(prompts, skipped_prompts="skipped", num_gaps="gaps"),
        "unnamed_blocks": None if prompts.names is None else prompts.names.unnamed,
        "bytes_per_block": today.bytes_per_block,
        "num_blocks": by_level((today.primary, today.secondary)),
        "recorded_hit_rate": by_level(_recorded(prompts, curve)),
        "end": end_json(prompts.reader.end),
    }


def _levels(found: CurveFound, blocks: int) -> tuple[int, int]:
    """Return the hits per level of a cache of `blocks` blocks, with as many primary ones as now."""
    primary = blocks if found.logged is None else min(blocks, found.today.primary)
    return found.curve.by_level(primary, blocks - primary)


def _recorded(prompts: LoggedPrompts, curve: HitCurve) -> tuple[float, float]:
    """Return the hits of the log's own cache from each level, as parts of all tokens in the counted blocks."""
    tokens = max(curve.block_requests * prompts.tokens_per_block, 1)
    return prompts.reused_primary / tokens, prompts.reused_secondary / tokens


def _table_sizes(found: CurveFound) -> list[int]:
    """Return powers of two up to where nothing is gained any more, and the requested sizes.

    Sizes of a sample begin with `_FEWEST` of its blocks. If policies were played, their sizes are used.
    """
    if found.policies:
        return list(found.policies)
    last = max(found.curve.distinct_blocks - 1, 0).bit_length()
    fewest = 1 if found.curve.rate == 1 else _FEWEST / found.curve.rate
    first = max(last + 1 - _ROWS, math.ceil(math.log2(fewest)))
    powers = {1 << exponent for exponent in range(first, last + 1)}
    return sorted(powers | _marks(found).keys() | found.bounds.keys() | set(found.asked))


def _marks(found: CurveFound) -> dict[int, str]:
    """Return the notes on sizes."""
    today = found.today
    names = [(today.primary, "primary now")] if today.primary else []
    if today.secondary:
        names.append((today.primary + today.secondary, "both levels now"))
    if found.curve.knee is not None:
        names.append((found.curve.knee, "knee"))
    marks: dict[int, str] = {}
    for blocks, name in names:
        marks[blocks] = f"{marks[blocks]}, {name}" if blocks in marks else name
    return marks


def _show(log: Path, found: CurveFound, out: Output) -> None:
    out.heading(f"{printable(str(log))}: reuse of its prompts by cache size")
    out.facts(_facts(found))
    if not found.curve.block_requests:
        return
    marks, sampled = _marks(found), found.curve.rate < 1 and not found.curve.is_vague
    rows = [
        _row(found, blocks, sampled=sampled)
        | {"": "█" * round(found.curve.hit_rate(blocks) * _BAR), " ": marks.get(blocks, "")}
        for blocks in _table_sizes(found)
    ]
    out.table(rows, right=list(rows[0])[:-2], gap=True)
    out.line()
    out.line("block hit rate: reused fraction of the prompts' full blocks")
    if found.policies:
        out.line(
            "following columns: hit rates of other eviction policies, in one level (`kvcache docs curve`)"
        )
    if found.costs.pricing is not None:
        out.line(found.costs.cells_in_words())
    if found.logged is not None and found.bytes_per_block is None:
        out.line(
            "bytes are unknown: the log's settings do not describe a model (num_layers, num_kv_heads, head_dim, ...)"
        )
    if found.bounds:
        out.line("at best: hit rate of a clairvoyant cache of this size, in one level")


def _timeouts(found: CurveFound) -> Iterator[tuple[int | None, int, float, int]]:
    """Yield (seconds, hits, hit rate, tokens that are reused without a timeout only), while there are such tokens."""
    curve, size = found.timeouts, found.prompts.tokens_per_block
    most = curve.hits()
    for seconds in TIMEOUTS:
        if (hits := curve.hits(seconds)) == most:
            break
        yield seconds, hits, curve.hit_rate(seconds), (most - hits) * size
    yield None, most, curve.hit_rate(), 0


def _show_timeouts(log: Path, found: CurveFound, out: Output) -> None:
    out.heading(f"{printable(str(log))}: reuse of its prompts by idle timeout")
    covered = f"{span(found.timeouts.seconds)}; reuse after longer pauses is not visible"
    out.facts([*_facts(found), ("covered", covered)])
    rows = [
        {"timeout": "none" if seconds is None else span(seconds), "block hit rate": share(rate)}
        | {"tokens lost": lost, **found.costs.cost_cells(found.cost_by_timeout(seconds))}
        | {"": "█" * round(rate * _BAR)}
        for seconds, _, rate, lost in _timeouts(found)
    ]
    out.table(rows, right=list(rows[0])[:-1], gap=True)
    out.line()
    out.line(
        "block hit rate: reused fraction of the prompts' full blocks, in an unbounded cache that drops blocks"
    )
    out.line("idle for longer than the timeout; tokens lost: reused only without a timeout")
    if found.costs.pricing is not None:
        out.line(found.costs.cells_in_words())


def _row(found: CurveFound, blocks: int, *, sampled: bool) -> dict[str, Any]:
    curve, best = found.curve, found.bounds.get(blocks)
    row: dict[str, Any] = {"blocks": blocks}
    if (block := found.bytes_per_block) is not None:
        row["bytes"] = size(blocks * block)
    row["block hit rate"] = share(curve.hit_rate(blocks))
    if sampled:
        row["±"] = share(curve.error(blocks) or 0.0)
    if found.today.secondary:
        row |= zip(LEVEL_NAMES, (_part(found, hits) for hits in _levels(found, blocks)), strict=True)
    row |= {name: _part(found, hits) for name, hits in found.policies.get(blocks, {}).items()}
    if found.bounds:
        row["at best"] = "" if best is None else _part(found, best)
    return row | dict(found.costs.cost_cells(found.cost(blocks)))


def _part(found: CurveFound, hits: int) -> str:
    return share(hits / max(found.curve.block_requests, 1))


def _facts(found: CurveFound) -> Facts:
    prompts, curve = found.prompts, found.curve
    asked = f"{curve.block_requests:,} full blocks of {prompts.tokens_per_block:,} tokens"
    number = prompts.requests if isinstance(prompts, TracePrompts) else prompts.admissions
    yield "prompts", f"{number:,} with {asked}, {curve.distinct_blocks:,} of them distinct"
    if found.logged is not None:
        yield from _facts_of_log(found.logged)
    if curve.rate < 1:
        error = "; ± standard error" * (not curve.is_vague)
        yield "estimated", f"from {SAMPLES} samples of {curve.rate:.3g} of the blocks{error}"
    if found.logged is not None:
        yield from _today(found.logged, curve)
    yield from found.costs.prefill_facts()
    yield from found.costs.model_facts()
    if not curve.is_vague:
        knee = f"{curve.knee or 0:,} blocks: no doubling from there gains a percentage point"
        yield "knee", "none: no block is requested twice" if curve.knee is None else knee


def _facts_of_log(prompts: LoggedPrompts) -> Facts:
    if prompts.windows > 1:
        yield "window", f"{prompts.window:,}, with full attention; sliding windows are ignored"
    if prompts.shared:
        why = "other layers share its pool, and may lose blocks that it keeps"
        yield "groups", f"full attention only: {why}"
    if prompts.gaps:
        lost = f"; {prompts.skipped:,} prompts are left out because their tokens are unknown"
        missing = f"batches are missing in {count(prompts.gaps, 'place')}, with the prompts in them"
        yield "gaps", missing + lost * bool(prompts.skipped)
    yield from names_facts(prompts)


def names_facts(prompts: LoggedPrompts) -> Facts:
    """Yield how blocks are told apart in a log without token ids."""
    if prompts.names is not None:
        rest = f"; {count(prompts.names.unnamed, 'block')} that no request has stored count as different from all"
        yield (
            "names",
            "the log records no tokens: blocks are told apart by name" + rest * bool(prompts.names.unnamed),
        )


def _today(prompts: LoggedPrompts, curve: HitCurve) -> Facts:
    """Return the curve's value at the log's own size, and the actual value of its cache."""
    primary, secondary = prompts.size.primary, prompts.size.secondary
    levels = [hits / max(curve.block_requests, 1) for hits in curve.by_level(primary, secondary)]
    parts = "{} from primary, {} from secondary" if secondary else "{}"
    blocks = f"{primary:,} + {secondary:,} blocks" if secondary else count(primary, "block")
    yield "now", f"{blocks}: {parts.format(*map(share, levels))}"
    recorded = parts.format(*map(share, _recorded(prompts, curve)))
    yield "recorded", f"{recorded} by the cache itself, with concurrent requests"


def _sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of blocks, or of bytes."""
    sizes = tuple(cache_size(part.strip()) for part in text.split(",") if len(part) < 20)
    blocks = [each for each in sizes if not isinstance(each, SizeInBytes)]
    if max(blocks, default=0) > MOST_BLOCKS or len(sizes) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"give up to {MOST_BLOCKS:,} blocks, separated by commas")
    return sizes


def _in_blocks(
    sizes: tuple[int, ...], prompts: LoggedPrompts | TracePrompts, costs: Costs
) -> tuple[int, ...]:
    """Return the sizes, those in bytes converted to blocks."""
    if not any(isinstance(each, SizeInBytes) for each in sizes):
        return sizes
    block = bytes_per_block(prompts, costs)
    if block is None:
        raise UsageError("the bytes of a block are unknown: give sizes in blocks, or --model-config")
    blocks = tuple(each // block if isinstance(each, SizeInBytes) else each for each in sizes)
    if 0 in blocks or max(blocks) > MOST_BLOCKS:
        raise UsageError(f"sizes must be 1 to {MOST_BLOCKS:,} blocks, and a block has {size(block)}")
    return blocks
