"""Results of other commands about the log, from their JSON: `kvcache curve --json` and `kvcache whatif --json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from kvcache.audit.advice import AdviceLine
from kvcache.audit.diff import settings_in
from kvcache.errors import UsageError
from kvcache.workload.reported import ReportedHour


@dataclass(eq=False, repr=False)
class UnreadableInput(UsageError):
    """The input is not the output of `command`. `what` names it: a file, or an argument."""

    what: str
    command: str
    reason: str
    text = "{what} is not the output of `kvcache {command} LOG --json`: {reason}"


@dataclass(eq=False, repr=False)
class OtherLog(UsageError):
    """The input is about another log."""

    what: str
    command: str
    text = "{what} is about another log: give the output of `kvcache {command} LOG --json` for this one"


class Supplements(NamedTuple):
    """Further sections of a page, about more than its log."""

    origin: Sequence[tuple[str, str]] = ()
    """Cache that a trace was played through, as labels and facts."""
    advice: Sequence[tuple[str, Sequence[AdviceLine]]] = ()
    """Advice on the cache, under titles."""
    unanswered: Sequence[str] = ()
    """Advice that cannot be given, and why."""
    reported: Sequence[ReportedHour] = ()
    """Cached tokens that the service of a trace has reported, by hour."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Blocks = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Positive = Annotated[float, msgspec.Meta(ge=0, le=2.0**62)]
_Number = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Plain = bool | _Number | float | str | list[_Number | float | str] | None
_Config = dict[str, _Plain | dict[str, _Plain]]


class ImportedCost(msgspec.Struct):
    """Time of prefills, and their cost per hour."""

    gpu_hours: _Positive
    saved_gpu_hours: _Positive
    mean_seconds: _Positive | None = None
    p95_seconds: _Positive | None = None
    saved_per_hour: _Positive | None = None


class ImportedFormula(msgspec.Struct):
    """Formula for prefill seconds, and the currency of the costs."""

    formula: str
    currency: str | None = None


class OfLog(msgspec.Struct, kw_only=True):
    """Output about a log or a trace that may include costs."""

    log_id: str | None = None
    trace: str | None = None
    prefill_model: ImportedFormula | None = None

    @property
    def cost_columns(self) -> list[str]:
        """Names of the cost columns."""
        if self.prefill_model is None:
            return []
        currency = self.prefill_model.currency
        return ["prefill", "p95", "GPU-hours", "saved"] + [f"{currency} saved/h"] * (currency is not None)

    def cost_values(self, cost: ImportedCost | None) -> list[float | None]:
        """Return the values for these columns: two are seconds."""
        if cost is None:
            return [None] * len(self.cost_columns)
        values = [
            cost.mean_seconds,
            cost.p95_seconds,
            cost.gpu_hours,
            cost.saved_gpu_hours,
            cost.saved_per_hour,
        ]
        return values[: len(self.cost_columns)]


class PolicyHits(msgspec.Struct):
    """Hits of another eviction order."""

    name: str
    hits: _Count


class Size(msgspec.Struct):
    """One size of the cache."""

    blocks: _Blocks
    hit_rate: _Part
    best_hits: _Count | None = None
    bytes: _Count | None = None
    prefill: ImportedCost | None = None
    policies: list[PolicyHits] = []


class Timeout(msgspec.Struct):
    """Reuse if blocks are dropped after that idle time; None: never."""

    hit_rate: _Part
    seconds: _Blocks | None = None


class ImportedCurve(OfLog):
    """Hit rates by size, and by retention time of idle blocks."""

    command: ClassVar[str] = "curve"
    sizes: list[Size]
    tokens_per_block: _Blocks | None = None
    block_requests: _Count = 0
    num_blocks: dict[Literal["primary", "secondary"], _Count] = {}
    knee: _Blocks | None = None
    timeouts: list[Timeout] = []

    def __post_init__(self) -> None:
        """Reject values that no curve has."""
        if any((size.best_hits or 0) > self.block_requests for size in self.sizes):
            raise ValueError("`best_hits` exceed `block_requests`")
        if any(each.hits > self.block_requests for size in self.sizes for each in size.policies):
            raise ValueError("`hits` of policies exceed `block_requests`")
        self.sizes.sort(key=lambda size: size.blocks)

    def best_rate(self, size: Size) -> float | None:
        """Return the hit rate that no eviction order exceeds at this size; None if unknown."""
        return None if size.best_hits is None else size.best_hits / max(self.block_requests, 1)

    def policy_rates(self) -> dict[str, list[tuple[int, float]]]:
        """Return sizes in blocks and hit rates of other eviction orders, by name."""
        rates: dict[str, list[tuple[int, float]]] = {}
        for size in self.sizes:
            for each in size.policies:
                rate = each.hits / max(self.block_requests, 1)
                rates.setdefault(each.name, []).append((size.blocks, rate))
        return rates

    @property
    def marks(self) -> list[tuple[int, str]]:
        """Named sizes in blocks."""
        primary, both = self.num_blocks.get("primary", 0), sum(self.num_blocks.values())
        names = {self.knee: "knee", primary: "primary", both: "both levels" if both > primary else "primary"}
        return [(blocks, name) for blocks, name in names.items() if blocks]


class ImportedTrial(msgspec.Struct):
    """One cache of a trial, or the recorded one."""

    hit_rate: _Part
    policy: str | None = None
    of_bound: Annotated[float, msgspec.Meta(ge=0)] | None = None
    computed_tokens: _Count = 0
    recomputed_tokens: _Count = 0
    blocks_onboarded: _Count = 0
    preempted: _Count = 0
    cut_short: _Count = 0
    too_long: _Count = 0
    unserved: _Count = 0
    config: _Config = {}
    cache_bytes: dict[Literal["primary", "secondary"], _Count] | None = None
    prefill: ImportedCost | None = None

    def settings(self) -> dict[str, Any]:
        """Return all settings by dotted name."""
        return dict(settings_in("", self.config))


class WhatIf(OfLog):
    """The recording, and the trials."""

    command: ClassVar[str] = "whatif"
    recorded: ImportedTrial
    trials: list[ImportedTrial]

    def differing(self) -> list[str]:
        """Return the dotted names of settings that differ between trials, without the policy if trials name theirs."""
        flat = [trial.settings() for trial in (self.recorded, *self.trials)]
        names = dict.fromkeys(name for each in flat for name in each)
        if all(trial.policy for trial in self.trials):
            names.pop("eviction_policy", None)
        return [name for name in names if len({repr(each.get(name)) for each in flat}) > 1]

    def counts(self) -> dict[str, str]:
        """Return the columns of counts that are not all 0, with the fields of trials that they show."""
        rows = (self.recorded, *self.trials)
        return {name: field for name, field in _COUNTS.items() if any(getattr(each, field) for each in rows)}


_COUNTS = {
    "computed": "computed_tokens",
    "after preemption": "recomputed_tokens",
    "onboarded": "blocks_onboarded",
    "preempted": "preempted",
    "cut short": "cut_short",
    "too long": "too_long",
    "unserved": "unserved",
}
_Form = TypeVar("_Form", ImportedCurve, WhatIf)


def understood(given: object, form: type[_Form], what: str) -> _Form:
    """Parse the JSON of a command, given as text or as values, into the data that a report shows.

    `what` names it in errors. Raises `UnreadableInput`.
    """
    if isinstance(given, form):
        return given
    try:
        # Values are serialized and parsed, so that only JSON is accepted: it has no NaN, and no lone surrogates.
        said = given if isinstance(given, bytes) else json.dumps(given, allow_nan=False).encode()
        return msgspec.json.decode(said, type=form)
    except RecursionError as error:
        raise UnreadableInput(what, form.command, "it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise UnreadableInput(what, form.command, str(error).partition("\n")[0]) from error


def refuse_other(log_id: str | None, given: ImportedCurve | WhatIf, what: str) -> None:
    """Raise `OtherLog` if the input names another log than this one, or a trace."""
    if given.trace is not None or (
        log_id is not None and given.log_id is not None and given.log_id != log_id
    ):
        raise OtherLog(what, given.command)
