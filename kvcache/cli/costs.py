"""Seconds, money and bytes in addition to tokens and blocks, for the commands with these options."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.audit.kv_shape import KVShape
from kvcache.audit.memory import Memory
from kvcache.audit.prefill import PrefillCost, PrefillModel, Pricing, Spending
from kvcache.audit.prefill_fit import FittedPrefill, fit, logged_samples, read_samples
from kvcache.audit.reasons import Reason
from kvcache.cli.output import Facts, Row, by_level, pick
from kvcache.errors import UsageError
from kvcache.phrases import count, duration, few, printable, share, size


@dataclass(frozen=True, slots=True)
class Costs:
    """Requested costs."""

    pricing: Pricing | None = None
    """Pricing; None if no prefill model was given."""
    fitted: FittedPrefill | None = None
    model: KVShape | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Costs:
        """Read the options, and fit. Raises `UsageError`, `OSError`, and for a log what `LogReader` raises."""
        fitted, prefill = None, None
        if args.prefill is not None:
            if args.prefill_fit is not None:
                raise UsageError("--prefill and --prefill-fit exclude each other: give one of them")
            prefill = PrefillModel.parse(args.prefill)
        elif args.prefill_fit is not None:
            path = args.prefill_fit
            samples = logged_samples(path) if path.is_dir() else read_samples(path)
            fitted = fit(samples, printable(str(path)))
            prefill = fitted.model
        elif args.price is not None or args.gpus is not None:
            raise UsageError("--price and --gpus require --prefill or --prefill-fit")
        model = None
        if args.model_config is not None:
            model = KVShape.read(args.model_config, dtype=args.kv_dtype, tensor_parallel=args.tensor_parallel)
        elif args.kv_dtype is not None:
            raise UsageError("--kv-dtype requires --model-config")
        gpus = args.gpus or args.tensor_parallel
        pricing = None if prefill is None else Pricing(prefill, gpus, args.price, args.currency)
        return cls(pricing, fitted, model)

    # -- for people

    def prefill_facts(self) -> Facts:
        """Return the time of prefills."""
        if self.pricing is None:
            return
        yield "prefill", f"{self.pricing.model} seconds for n tokens that attend to m tokens each"
        if (fitted := self.fitted) is not None:
            error = f"RMS error {duration(fitted.rms_seconds)}, median {share(fitted.median_part)}"
            decoding = f"; {duration(fitted.per_decoding)} more per decoding request" * (
                fitted.per_decoding > 0
            )
            yield "", f"fitted to {count(fitted.samples, 'prefill')}: {error}{decoding}"

    def cost_cells(self, cost: PrefillCost | None) -> Row:
        """Return time and cost for a row of a table."""
        if self.pricing is None:
            return {}
        row = {"prefill": "-", "p95": "-", "GPU-hours": "-", "saved": "-"}
        if cost is not None and cost.mean_seconds is not None:
            times = duration(cost.mean_seconds), duration(cost.p95_seconds or 0.0)
            row = dict(zip(row, (*times, few(cost.gpu_hours), few(cost.saved_gpu_hours)), strict=True))
        if self.pricing.price is not None:
            saved = None if cost is None else cost.saved_per_hour
            row[f"{self.currency} saved/h"] = "-" if saved is None else few(saved)
        return row

    @property
    def currency(self) -> str:
        """Currency of the price."""
        return printable(self.pricing.currency) if self.pricing is not None else ""

    def cells_in_words(self) -> str:
        """Format the meaning of these cells."""
        priced = self.pricing is not None and self.pricing.price is not None
        return (
            "prefill, p95: mean and 95th percentile of the time to compute a prompt; saved: GPU-hours saved by reuse"
            + ", and money saved per hour" * priced
        )

    def model_facts(self) -> Facts:
        """Return the bytes of a token."""
        if (model := self.model) is None:
            return
        gpus = f", on each of {model.tensor_parallel} GPUs" * (model.tensor_parallel > 1)
        layers = f"{count(model.layers, 'layer')}, {model.dtype}{gpus}"
        yield "K and V", f"{size(model.bytes_per_token)} per token of {printable(model.name)}: {layers}"
        for window, number, num_bytes in model.sliding:
            most = size(window * num_bytes)
            yield (
                "",
                f"not counted: up to {most} per sequence in {count(number, 'layer')} with a {window:,}-token window",
            )
        for kind, number in model.without.items():
            yield "", f"not counted: {count(number, 'layer')} without K and V ({kind})"

    # -- for programs

    def to_json(self, hours: float | None) -> dict[str, Any]:
        """Return the assumptions behind the other numbers; `hours` is the requests' own time."""
        model: dict[str, Any] | None = None
        if self.model is not None:
            names = ("window", "layers", "bytes_per_token")
            sliding = [dict(zip(names, each, strict=True)) for each in self.model.sliding]
            model = asdict(self.model) | {"sliding": sliding}
        if self.pricing is None:
            return {"prefill_model": None, "model": model}
        fitted = self.fitted and {
            "prefills": self.fitted.samples,
            **pick(self.fitted, "rms_seconds", "median_part", seconds_per_decoding="per_decoding"),
        }
        return {"prefill_model": self.pricing.to_json(hours) | {"fit": fitted}, "model": model}


@dataclass(frozen=True, slots=True)
class AuditCosts:
    """Cost of the prefills of one log, or of several."""

    costs: Costs
    spending: Spending | None
    """Their spending; None if no prefill model was given."""

    @property
    def cost(self) -> PrefillCost | None:
        """Cost of all prefills."""
        return None if self.spending is None else self.spending.cost

    def facts(self) -> Facts:
        """Return the cost, and the part that is lost."""
        if (spending := self.spending) is None:
            return
        yield from self.costs.prefill_facts()
        cost, currency = spending.cost, self.costs.currency
        if cost.mean_seconds is not None:
            half, most = duration(cost.p50_seconds or 0.0), duration(cost.p95_seconds or 0.0)
            yield "time to prefill", f"{duration(cost.mean_seconds)} on average, p50 {half}, p95 {most}"
            yield "GPU-hours", f"{few(cost.gpu_hours)} for prefills; reuse saved {few(cost.saved_gpu_hours)}"
            if cost.cost_per_hour is not None and cost.saved_per_hour is not None:
                each_hour = f"{few(cost.cost_per_hour)} for prefills; reuse saves {few(cost.saved_per_hour)}"
                yield f"{currency} per hour", each_hour
        for lost, why in ((spending.seconds.evicted, "evicted"), (spending.seconds.lost, "cleared or lost")):
            if lost:
                hours, money = spending.spent(lost)
                per_hour = "" if money is None else f", {few(money)} {currency} per hour"
                yield "lost", f"{few(hours)} GPU-hours{per_hour}, on tokens that had been {why}"

    def of_reason(self, reason: Reason) -> Row:
        """Return cells for a reason's tokens, even if they were reused."""
        return {} if self.spending is None else self.cells(float(self.spending.seconds.by_reason[reason]))

    def cells(self, seconds: float, saved: float | None = None) -> Row:
        """Return cells for seconds of prefills, and for the saved ones if given."""
        if self.spending is None:
            return {}
        hours, money = self.spending.spent(seconds)
        row = {"GPU-hours": few(hours)}
        row |= {} if saved is None else {"saved": few(self.spending.spent(saved)[0])}
        return row | ({} if money is None else {f"{self.costs.currency}/h": few(money)})

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        if (of := self.spending) is None:
            return {**self.costs.to_json(None), "prefill": None}
        return {**self.costs.to_json(of.hours), "prefill": of.seconds.to_json(of.pricing, of.hours)}

    def of_group_json(self, spent_seconds: float, saved_seconds: float) -> dict[str, Any] | None:
        """Return the spent and saved costs of some of the requests."""
        if self.spending is None:
            return None
        (spent, cost), (saved, not_paid) = map(self.spending.spent, (spent_seconds, saved_seconds))
        hours = {"gpu_hours": spent, "saved_gpu_hours": saved}
        return {**hours, "cost_per_hour": cost, "saved_per_hour": not_paid}


def memory_json(memory: Memory | None) -> dict[str, Any] | None:
    """Return the memory, with levels by name."""
    if memory is None:
        return None
    levels = {"cache_bytes": by_level(memory.cache_bytes), "evicted_bytes": by_level(memory.evicted_bytes)}
    return asdict(memory) | levels


def memory_facts(memory: Memory | None) -> Facts:
    """Return the memory of blocks."""
    if memory is None:
        return
    yield "memory", f"{_levels(memory.cache_bytes, 'in')}; {size(memory.bytes_per_block)} per block"
    if memory.evicted_bytes is None or memory.stored_bytes is None:
        return
    evicted, moved = _levels(memory.evicted_bytes, "evicted from", "from"), ""
    if memory.offloaded_bytes and memory.onboarded_bytes is not None:
        moved = f"; {size(memory.offloaded_bytes)} offloaded, {size(memory.onboarded_bytes)} onboarded"
    yield "", f"{size(memory.stored_bytes)} stored, {evicted}{moved}"


def _levels(num_bytes: tuple[int, int], where: str, also: str = "in") -> str:
    primary, secondary = num_bytes
    return f"{size(primary)} {where} primary" + f", {size(secondary)} {also} secondary" * (secondary > 0)
