"""``kvcache advise``: advice on a cache, on one page; each line ends with the command that proves it."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.audit.advice import (
    Advice,
    AdviceLine,
    Advised,
    Observed,
    Topic,
    Unanswered,
    advise,
    observe_log,
    observe_trace,
)
from kvcache.cli import times
from kvcache.cli.costs import Costs
from kvcache.cli.curve import bytes_per_block, trace_prompts
from kvcache.cli.options import add_cost_options, add_shared, option, positive, seekable
from kvcache.cli.output import Facts, Output, by_level, pick
from kvcache.cli.process import leaving_at_sigterm
from kvcache.cli.traces import LOG_OR_TRACE, Served, add_trace, as_log, is_trace
from kvcache.errors import UsageError
from kvcache.phrases import count, few, printable, share, size, span

AdviceText = tuple[str, str | None]
"""A sentence, and the command that proves it; None if there is none."""
MINUTES = 5.0
"""Timeout that is asked about where none is given."""
_WIDTH = 120
"""Maximum width of a line, except for commands, which are not wrapped so that they can be copied."""
_COSTLY = ("curve", "audit", "whatif", "report")
"""Commands with options for costs."""
_COSTS = (
    "prefill",
    "prefill_fit",
    "gpus",
    "price",
    "currency",
    "model_config",
    "kv_dtype",
    "tensor_parallel",
)
_LEFT_OUT = {"currency": "USD", "tensor_parallel": 1}
"""Options left out of commands when they have these values, the defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Recommend changes to a cache: its size, an idle timeout, an eviction order, a prefix to pin, the number of "
        "concurrent requests, tenants that lose most to evictions, and parts of prompts that prevent reuse. "
        "Each line shows what it would save, and ends with the command that proves it."
    )
    parser.epilog = "`kvcache docs advise` explains each line, and when it is missing."
    add_shared(parser, "json")
    option(parser, "LOG", f"{LOG_OR_TRACE}; a log must contain token ids", nargs="+")
    option(
        parser,
        "--ttl TIME",
        f"idle timeout whose losses to estimate, in minutes or with a unit, as in 90s (default: {MINUTES:g}min)",
        type=_minutes,
        default=MINUTES,
    )
    add_trace(parser)
    add_cost_options(parser)


def _minutes(text: str) -> float:
    """Parse minutes, or a duration with its unit, into minutes."""
    return positive(text) if text.isdigit() else times.length(text) / 60e9


def run(args: argparse.Namespace, out: Output) -> int:
    """Read each log or trace, and print the advice."""
    said, costs = [], Costs.of(args)
    for number, source in enumerate(args.log):
        own = argparse.Namespace(**{**vars(args), "log": source})
        found, served = _observe(own, out)
        advised, page = advise(found, 60.0 * args.ttl), Page(own, found, costs)
        if args.json:
            said.append(to_json(page, advised) | served.to_json())
            continue
        if number:
            out.line()
        _show(page, advised, served, out)
    if args.json:
        out.json({"sources": said})
    return 0


def _observe(args: argparse.Namespace, out: Output) -> tuple[Observed, Served]:
    if not is_trace(args.log):
        with leaving_at_sigterm(), as_log(args, out) as served, out.progress("reading") as update:
            return observe_log(served.log, update), served
    # A trace may come from a pipe, and is read more than once.
    with leaving_at_sigterm(), seekable(args.log) as source:
        served = Served(args.log)

        @contextmanager
        def play(tokens_per_block: int) -> Iterator[Path]:
            nonlocal served
            if args.tokens_per_block not in (None, tokens_per_block):
                raise UsageError(
                    f"the blocks of this trace have {tokens_per_block:,} tokens, which cannot be changed: omit "
                    "--tokens-per-block"
                )
            sizes = {"tokens_per_block": tokens_per_block, "secondary_blocks": args.secondary_blocks or 0}
            with as_log(argparse.Namespace(**{**vars(args), **sizes, "log": source}), out) as served:
                yield served.log

        about_a_cache = (args.secondary_blocks, args.concurrency, args.keep_log)
        if args.primary_blocks is None and any(each is not None for each in about_a_cache):
            raise UsageError("--secondary-blocks, --concurrency and --keep-log require --primary-blocks")
        played = None if args.primary_blocks is None else play
        return observe_trace(printable(str(args.log)), partial(trace_prompts, args, source), played), served


# -- for people


@dataclass(frozen=True, slots=True)
class Page:
    """Results for one log or trace, in words."""

    args: argparse.Namespace
    found: Observed
    costs: Costs

    @property
    def bytes_per_block(self) -> int | None:
        """Bytes of a block; None if no model is known."""
        return bytes_per_block(self.found.prompts, self.costs)

    @property
    def hours(self) -> float:
        """Hours from the first request to the last."""
        return self.found.seconds / 3600

    def gpu_hours(self, tokens: int) -> float | None:
        """Return the GPU-hours to compute prompt tokens at the mean position of all; None if no formula is known."""
        pricing, lengths = self.costs.pricing, np.array(self.found.prompts.lengths, np.float64)
        if pricing is None:
            return None
        seconds = float(pricing.model.work(0.0, lengths).sum())
        return pricing.gpu_hours(seconds * tokens / self.found.prompt_tokens)

    def money(self, tokens: int) -> float | None:
        """Return their cost per hour; None if no price is known."""
        hours, pricing = self.gpu_hours(tokens), self.costs.pricing
        return None if hours is None or pricing is None else pricing.per_hour(hours, self.hours)

    def quoted(self, text: object) -> str:
        """Quote text for a shell."""
        return shlex.quote(printable(str(text)))

    def command(self, name: str, *options: object) -> str:
        """Return a command on this log, or on this trace as it was played."""
        words = ["kvcache", name, self.quoted(self.args.log), *map(str, options)]
        given = self._given_of_trace(name) if is_trace(self.args.log) else {}
        if name in _COSTLY:
            given |= {each: getattr(self.args, each) for each in _COSTS}
        for each, value in given.items():
            if value is not None and value != _LEFT_OUT.get(each):
                text = f"{value:g}" if isinstance(value, float) else value
                words += [f"--{each.replace('_', '-')}", self.quoted(text)]
        return " ".join(words)

    def _given_of_trace(self, name: str) -> dict[str, object]:
        """Return the options by which a trace is read and, except by `curve`, played."""
        args, losses = self.args, self.found.losses
        given: dict[str, object] = {"trace_block_size": args.trace_block_size, "tokenizer": args.tokenizer}
        if name == "curve" or losses is None:
            return given | {"tokens_per_block": args.tokens_per_block}
        given |= {"primary_blocks": losses.primary, "secondary_blocks": losses.secondary}
        return given | {"tokens_per_block": self.found.tokens_per_block, "concurrency": args.concurrency}

    def room(self, blocks: int) -> str:
        """Format a number of blocks."""
        own = self.bytes_per_block
        in_bytes = "" if own is None else f", {size(blocks * own)}"
        return f"{count(blocks, 'block')} ({count(blocks * self.found.tokens_per_block, 'token')}{in_bytes})"

    def saved(self, tokens: int) -> str:
        """Format a number of tokens that are computed, or would not be."""
        if not tokens:
            return "nothing"
        total, each_hour = f"{share(tokens / self.found.prompt_tokens)} of all", []
        if (hours := self.gpu_hours(tokens)) is not None:
            total += f", {_rounded(hours)} GPU-hours"
        if self.hours:
            each_hour.append(f"{tokens / self.hours:,.0f} tokens/h")
        if (money := self.money(tokens)) is not None:
            each_hour.append(f"{_rounded(money)} {self.costs.currency}/h")
        return f"{count(tokens, 'token')} ({total})" + f", or {' and '.join(each_hour)}" * bool(each_hour)

    def header(self) -> str:
        """Format the basis of the advice."""
        found, losses = self.found, self.found.losses
        tokens = count(found.prompt_tokens, "prompt token")
        said = f"{count(found.requests, 'request')} in {span(found.seconds)}, {tokens}"
        if losses is None:
            return said
        reused = share(losses.reused_tokens / max(found.prompt_tokens, 1))
        return f"{said}: {reused} reused, {share(losses.lost_tokens / max(found.prompt_tokens, 1))} lost to evictions"

    # -- sentences, with the commands that prove them

    def volatile(self, advice: Advice) -> AdviceText:
        """Format advice on the volatile part."""
        about, unit = advice.about, advice.about["compared_tokens"]
        where = "" if unit == 1 else f" (to blocks of {unit:,} tokens: the trace has no token ids)"
        if not about["requests"]:
            return f"no prompts differ only in a part in the middle{where}", None
        own = "{shortest:,}" if about["shortest"] == about["longest"] else "{shortest:,} to {longest:,}"
        said = (
            f"{count(about['requests'], 'prompt')} share the first {count(about['position'], 'token')}, differ in the "
            f"next {own.format(**about)} ({count(about['values'], 'version')}), and share {about['alike_tokens']:,} "
            f"more{where}; moving the differing part to the end would save {self.saved(advice.saved_tokens)}"
        )
        if is_trace(self.args.log):
            return said, None
        return said, self.command("explain", "--request", self.quoted(about["request_id"]))

    def size(self, advice: Advice) -> AdviceText:
        """Format advice on the knee of the curve."""
        about = advice.about
        knee = f"{self.room(about['knee_blocks'])} reuse {share(about['knee_hit_rate'])} of the full blocks"
        if about["verdict"] == "unknown":
            return f"{knee}; no doubling from there gains a percentage point", self.command("curve")
        said = f"{knee}, the current {self.room(about['blocks'])} {share(about['hit_rate'])}"
        if about["verdict"] == "larger":
            said = f"too small: {said}; the size of the knee would save {self.saved(advice.saved_tokens)}"
        elif about["verdict"] == "smaller":
            held = count(about["held_blocks"], "block")
            said = f"larger than needed: {said}; in addition, running requests hold up to {held}"
        return said, self.command("curve", "--sizes", f"{about['knee_blocks']},{about['blocks']}")

    def primary(self, advice: Advice) -> AdviceText:
        """Format advice on twice the blocks."""
        blocks = advice.about["blocks"]
        said = f"{self.room(blocks)} would save {self.saved(advice.saved_tokens)}"
        return said, self.command("whatif", "--set", f"primary_blocks={blocks}")

    def host(self, advice: Advice) -> AdviceText:
        """Format advice on a secondary level."""
        blocks, now = advice.about["blocks"], advice.about["blocks_now"]
        if blocks == now:
            return "the current size suffices", self.command("curve")
        said = f"{self.room(blocks)} in secondary instead of {now:,} would save {self.saved(advice.saved_tokens)}"
        return said, self.command("whatif", "--set", f"secondary_blocks={blocks}")

    def policy(self, advice: Advice) -> AdviceText:
        """Format advice on another eviction order."""
        about = advice.about
        better = f"{about['policy']} {share(about['hit_rate'])}"
        usual = f"lru {share(about['lru_hit_rate'])} of the full blocks"
        if advice.worth:
            said = f"{better}, {usual}, in a cache of this size: that is {self.saved(advice.saved_tokens)}"
        else:
            said = f"of the others none is much better in a cache of this size: {better}, {usual}"
        sizes = ("--policy", f"lru,{about['policy']}", "--sizes", about["blocks"])
        return said, self.command("curve", *sizes)

    def ttl(self, advice: Advice) -> AdviceText:
        """Format advice on dropping idle blocks."""
        about = advice.about
        lost = f"after {span(about['seconds'])} an unbounded cache loses {self.saved(about['lost_tokens'])}"
        if not advice.worth:
            return f"if idle blocks are dropped {lost}", self.command("curve", "--ttl")
        enough = about["enough_seconds"]
        keep = "do not drop idle blocks" if enough is None else f"keep idle blocks for {span(enough)}"
        return f"{keep}: if they are dropped {lost}", self.command("curve", "--ttl")

    def pin(self, advice: Advice) -> AdviceText:
        """Format advice on the prefix that many prompts share."""
        about = advice.about
        if not about["prefix_tokens"]:
            proof = None if self.found.losses is None else self.command("audit")
            return "no prefix is shared by 5 % of the requests", proof
        part = share(about["asked_tokens"] / self.found.prompt_tokens)
        said = (
            f"{count(about['requests'], 'request')} begin with the same {count(about['prefix_tokens'], 'token')}, "
            f"{part} of all (the first is request {printable(str(about['request_id']))})"
        )
        if about["lost_tokens"] is None:
            return f"{said}; give --primary-blocks to see if they stay cached", None
        said += f"; their evictions cost {self.saved(about['lost_tokens'])}"
        if advice.worth:
            said += f"; pinning them takes {share(about['primary_share'])} of primary"
        if about["name"] is None or is_trace(self.args.log):
            return said, self.command("audit")
        return said, self.command("events", "--block", about["name"])

    def running(self, advice: Advice) -> AdviceText:
        """Format advice on blocks held by running requests."""
        about = advice.about
        held = f"{about['held_blocks']:,} of {count(about['blocks'], 'block')} on average"
        said = (
            f"{about['running']:.1f} running requests hold {held}, {about['most_held_blocks']:,} at most, and nearly "
            f"all blocks at {share(about['full'])} of the admissions"
        )
        if advice.worth:
            said += (
                f"; evictions cost {self.saved(about['lost_tokens'])}, which no eviction policy or pin changes much. "
                f"With {about['at_a_time']:,} concurrent requests half of the blocks are free for reuse"
            )
            return said, self.command("whatif")
        if is_trace(self.args.log):
            return said, self.command("report")
        return said, self.command("replay", "--at", about["seq"])

    def tenant(self, advice: Advice) -> AdviceText:
        """Format advice on the tenant that loses the largest part."""
        about, proof = advice.about, self.command("audit", "--by", advice.about["by"])
        if about["tenants"] < 2:
            return "there is only one tenant", proof
        if not about["lost_tokens"]:
            return "no tenant loses tokens to evictions", proof
        if about["lost_rate"] <= about["others_lost_rate"]:
            return f"all tenants lose {share(about['lost_rate'])} of their prompt tokens to evictions", proof
        said = (
            f"{printable(about['tenant'])} loses {share(about['lost_rate'])} of its prompt tokens to evictions, the "
            f"others {share(about['others_lost_rate'])}; {count(about['lost_to_others_tokens'], 'token')} were "
            "evicted for others"
        )
        if about["taker"] is not None:
            said += f", most of them for {printable(about['taker'])}"
        return said, proof

    def words(self, advice: Advice) -> AdviceText:
        """Return the sentence of a piece of advice, and the command that proves it."""
        return _TOPICS[advice.topic][1](self, advice)

    def lines(self, advised: Advised) -> Iterator[tuple[str, list[AdviceLine]]]:
        """Yield all advice in words, under the titles that it has."""
        for title, worth in (("worth doing", True), ("not worth it", False)):
            of = [each for each in advised.advice if each.worth is worth]
            if of:
                yield title, [AdviceLine(_TOPICS[each.topic][0], *self.words(each)) for each in of]


_TOPICS: dict[Topic, tuple[str, Callable[[Page, Advice], AdviceText]]] = {
    "volatile": ("volatile part", Page.volatile),
    "size": ("size", Page.size),
    "primary": ("double primary", Page.primary),
    "host": ("host tier", Page.host),
    "policy": ("eviction order", Page.policy),
    "ttl": ("timeout", Page.ttl),
    "pin": ("pin a prefix", Page.pin),
    "running": ("concurrency", Page.running),
    "tenant": ("tenants", Page.tenant),
}
"""Topics with their labels, and the sentences of their advice."""


def unanswered(advised: Advised) -> Iterator[str]:
    """Yield topics without advice, by reason."""
    for reason, topics in groupby(sorted(advised.left_out, key=_reason), _reason):
        yield f"{', '.join(_TOPICS[each.topic][0] for each in topics)}: {reason}"


def _facts(line: AdviceLine, width: int) -> Facts:
    """Yield the advice as wrapped lines, for labels of `width` characters."""
    label = line.topic
    for part in _wrapped(line.said, _WIDTH - 4 - width):
        yield label, part
        label = ""
    if line.proof is not None:
        yield "", line.proof


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a sentence without separating numbers from their percent signs."""
    whole = textwrap.wrap(text.replace(" %", "\xa0%"), width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0%", " %") for line in whole]


def _rounded(number: float) -> str:
    """Format a number with three significant digits; a tiny one as "< 0.001"."""
    return "< 0.001" if 0 < number < 0.001 else few(number)


def _show(page: Page, advised: Advised, served: Served, out: Output) -> None:
    out.heading(f"{printable(str(page.args.log))}: {page.header()}")
    out.facts(served.facts())
    for title, lines in page.lines(advised):
        out.line()
        out.heading(title)
        width = max(len(each.topic) for each in lines)
        out.facts(fact for each in lines for fact in _facts(each, width))
    if advised.left_out:
        out.line()
        out.heading("unknown")
        for said in unanswered(advised):
            for number, line in enumerate(_wrapped(said, _WIDTH - 6)):
                out.line(f"  {'  ' * bool(number)}{line}")


def _reason(left_out: Unanswered) -> str:
    if left_out.needed_seconds is None:
        return left_out.reason
    return f"{left_out.reason}; at least {span(left_out.needed_seconds)} are needed"


# -- for programs


def to_json(page: Page, advised: Advised) -> dict[str, Any]:
    """Return everything about one log or trace."""
    found, losses = page.found, page.found.losses
    blocks = None if losses is None else (losses.primary, losses.secondary)
    return {
        "log": page.args.log,
        **pick(found, "requests", "prompt_tokens", "tokens_per_block", "seconds"),
        "bytes_per_block": page.bytes_per_block,
        "num_blocks": by_level(blocks),
        "reused_tokens": None if losses is None else losses.reused_tokens,
        "lost_tokens": None if losses is None else losses.lost_tokens,
        "advice": [
            {
                **pick(each, "topic", "worth", "saved_tokens", "about"),
                "saved_gpu_hours": page.gpu_hours(each.saved_tokens),
                "saved_per_hour": page.money(each.saved_tokens),
                "proof": page.words(each)[1],
            }
            for each in advised.advice
        ],
        **page.costs.to_json(page.hours or None),
        "left_out": [pick(each, "topic", "reason", "needed_seconds") for each in advised.left_out],
    }
