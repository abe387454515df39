"""Seconds, money and bytes in addition to tokens and blocks, for the commands with these options."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcache.audit.kv_shape import KVShape
from kvcache.audit.memory import Memory
from kvcache.audit.prefill import PrefillCost, PrefillModel, PrefillSeconds, Pricing
from kvcache.audit.prefill_fit import FittedPrefill, fit, logged_samples, read_samples
from kvcache.audit.reasons import Reason
from kvcache.cli.output import Facts, Row
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
            fitted = _fitted(args)
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

    def __bool__(self) -> bool:
        """Return True if any option was given."""
        return self.pricing is not None or self.model is not None

    def refuse_for(self, what: str) -> None:
        """Raise `UsageError` if any option was given, because costs do not apply to `what`."""
        if self:
            raise UsageError(f"--prefill and --model-config do not apply to {what}: omit them")

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

    def cost_facts(self, cost: PrefillCost | None) -> Facts:
        """Return the time and cost of some requests' prefills."""
        if self.pricing is None or cost is None or cost.mean_seconds is None:
            return
        half, most = duration(cost.p50_seconds or 0.0), duration(cost.p95_seconds or 0.0)
        yield "time to prefill", f"{duration(cost.mean_seconds)} on average, p50 {half}, p95 {most}"
        spent, saved = few(cost.gpu_hours), few(cost.saved_gpu_hours)
        yield "GPU-hours", f"{spent} for prefills; reuse saved {saved}"
        if cost.cost_per_hour is not None and cost.saved_per_hour is not None:
            spent, saved = few(cost.cost_per_hour), few(cost.saved_per_hour)
            yield f"{self.currency} per hour", f"{spent} for prefills; reuse saves {saved}"

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
        pricing, fitted, model = self.pricing, self.fitted, self.model
        return {
            "prefill_model": None if pricing is None else pricing.to_json(hours) | {"fit": _fit_json(fitted)},
            "model": None if model is None else _model_json(model),
        }


@dataclass(frozen=True, slots=True)
class AuditCosts:
    """Cost of the prefills of one log, or of several."""

    costs: Costs
    seconds: PrefillSeconds | None
    """Prefill seconds; None if no prefill model was given."""
    hours: float | None
    """Hours of the logs."""

    @property
    def cost(self) -> PrefillCost | None:
        """Cost of all prefills."""
        pricing, seconds = self.costs.pricing, self.seconds
        return None if pricing is None or seconds is None else seconds.cost(pricing, self.hours)

    def facts(self) -> Facts:
        """Return the cost, and the part that is lost."""
        pricing, seconds = self.costs.pricing, self.seconds
        if pricing is None or seconds is None:
            return
        yield from self.costs.prefill_facts()
        yield from self.costs.cost_facts(self.cost)
        for lost, why in ((seconds.evicted, "evicted"), (seconds.lost, "cleared or lost")):
            if lost:
                spent = pricing.gpu_hours(lost)
                money = pricing.per_hour(spent, self.hours)
                per_hour = "" if money is None else f", {few(money)} {self.costs.currency} per hour"
                yield "lost", f"{few(spent)} GPU-hours{per_hour}, on tokens that had been {why}"

    def cells(self, reason: Reason) -> Row:
        """Return the cost of a reason's tokens, even if they were reused."""
        pricing, seconds = self.costs.pricing, self.seconds
        if pricing is None or seconds is None:
            return {}
        spent = pricing.gpu_hours(float(seconds.by_reason[reason]))
        money = pricing.per_hour(spent, self.hours)
        return {"GPU-hours": few(spent)} | ({} if money is None else {f"{self.costs.currency}/h": few(money)})

    def to_json(self) -> dict[str, Any]:
        """Return everything."""
        pricing, seconds = self.costs.pricing, self.seconds
        prefill = None if pricing is None or seconds is None else seconds.to_json(pricing, self.hours)
        return {**self.costs.to_json(self.hours), "prefill": prefill}

    def of_group(self, spent_seconds: float, saved_seconds: float) -> Row:
        """Return cells for some of the requests."""
        found = self.of_group_json(spent_seconds, saved_seconds)
        if found is None:
            return {}
        row = {"GPU-hours": few(found["gpu_hours"]), "saved": few(found["saved_gpu_hours"])}
        money = found["cost_per_hour"]
        return row | ({} if money is None else {f"{self.costs.currency}/h": few(money)})

    def of_group_json(self, spent_seconds: float, saved_seconds: float) -> dict[str, Any] | None:
        """Return the spent and saved costs of some of the requests."""
        if (pricing := self.costs.pricing) is None:
            return None
        spent, saved = pricing.gpu_hours(spent_seconds), pricing.gpu_hours(saved_seconds)
        money = pricing.per_hour(spent, self.hours), pricing.per_hour(saved, self.hours)
        per_hour = dict(zip(("cost_per_hour", "saved_per_hour"), money, strict=True))
        return {"gpu_hours": spent, "saved_gpu_hours": saved, **per_hour}


def _fitted(args: argparse.Namespace) -> FittedPrefill:
    path, shown = args.prefill_fit, printable(str(args.prefill_fit))
    return fit(logged_samples(path) if path.is_dir() else read_samples(path), shown)


def _fit_json(fitted: FittedPrefill | None) -> dict[str, Any] | None:
    if fitted is None:
        return None
    return {
        "prefills": fitted.samples,
        "rms_seconds": fitted.rms_seconds,
        "median_part": fitted.median_part,
        "seconds_per_decoding": fitted.per_decoding,
    }


def _model_json(model: KVShape) -> dict[str, Any]:
    sliding = [
        dict(zip(("window", "layers", "bytes_per_token"), each, strict=True)) for each in model.sliding
    ]
    return {**asdict(replace(model, sliding=())), "sliding": sliding}


def cost_json(cost: PrefillCost | None) -> dict[str, Any] | None:
    """Return a whole cost."""
    return None if cost is None else asdict(cost)


def memory_json(memory: Memory | None) -> dict[str, Any] | None:
    """Return the memory, with levels by name."""
    from events.structs import LEVEL_NAMES

    if memory is None:
        return None
    by_level = {
        name: dict(zip(LEVEL_NAMES, each, strict=True))
        for name, each in (("cache_bytes", memory.cache_bytes), ("evicted_bytes", memory.evicted_bytes))
        if each is not None
    }
    return {**asdict(memory), **by_level}


def memory_facts(memory: Memory | None) -> Facts:
    """Return the memory of blocks."""
    if memory is None:
        return
    primary, secondary = memory.cache_bytes
    levels = f"{size(primary)} in primary" + f", {size(secondary)} in secondary" * (secondary > 0)
    yield "memory", f"{levels}; {size(memory.bytes_per_block)} per block"
    if memory.evicted_bytes is None or memory.stored_bytes is None:
        return
    primary, secondary = memory.evicted_bytes
    evicted = f"{size(primary)} evicted from primary" + f", {size(secondary)} from secondary" * (
        secondary > 0
    )
    moved = ""
    if memory.offloaded_bytes and memory.onboarded_bytes is not None:
        moved = f"; {size(memory.offloaded_bytes)} offloaded, {size(memory.onboarded_bytes)} onboarded"
    yield "", f"{size(memory.stored_bytes)} stored, {evicted}{moved}"
