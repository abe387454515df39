"""Prefill time by a simple model, the time saved by reuse, and the cost of both.

Each computed token takes a constant time, and a time for every token that it attends to, so the seconds of a prompt are
the sum over its tokens, and can be split by the reasons for which they were computed.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.history import HistoryFold, HistoryListener, RunningRequest
from kvcache.audit.reasons import EVICTIONS, LOSSES, Reason
from kvcache.errors import UsageError

Seconds = npt.NDArray[np.float64]
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_TERM = re.compile(
    rf"(\d+\.?\d*(?:e[+-]?\d+)?)\s*({'|'.join(filter(None, _UNITS))})?\s*\*?\s*(n(?:\s*\*?\s*m)?)?",
    re.ASCII,
)
_EXAMPLE = "'0.004 + 6e-5 n + 2e-10 n m', in seconds, or '4ms + 60us n + 0.2ns n m'"
_HOUR = 3600.0
MOST_SECONDS = 1e6
"""Upper limit of a prefill, or of a term for a token, in seconds."""


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds to compute `n` prompt tokens after `k` cached ones: ``a + b n + c n m``, where `m` is ``k + n / 2``.

    `m` is the mean number of earlier tokens that each new token reads: after `k` cached ones the first reads `k`,
    the last ``k + n``.
    """

    start: float
    """`a`: seconds of each prefill."""
    per_token: float
    """`b`: seconds per token."""
    per_read: float
    """`c`: seconds per token that a token attends to."""

    @classmethod
    def parse(cls, text: str) -> PrefillModel:
        """Parse ``a + b n + c n m``; terms may be left out, and have units. Raises `UsageError`."""
        found: dict[str, float] = {}
        for part in re.split(r"(?<![eE])\+", text):
            term = _TERM.fullmatch(part.strip().lower())
            name = re.sub(r"[\s*]", "", term[3] or "") if term else ""
            if term is None or name in found:
                raise UsageError(f"prefill {text!r}: {part.strip()!r} is not understood: write {_EXAMPLE}")
            found[name] = float(term[1]) * _UNITS[term[2] or ""]
            if found[name] > MOST_SECONDS:
                raise UsageError(
                    f"prefill {text!r}: {part.strip()!r} is more than {MOST_SECONDS:,.0f} seconds: write {_EXAMPLE}"
                )
        if not any(found.values()):
            raise UsageError(f"prefill {text!r} gives no seconds: write {_EXAMPLE}")
        return cls(found.get("", 0.0), found.get("n", 0.0), found.get("nm", 0.0))

    def __str__(self) -> str:
        return f"{self.start:.4g} + {self.per_token:.4g} n + {self.per_read:.4g} n m"

    def work(self, first: Any, stop: Any) -> Any:
        """Return the seconds of a prompt's tokens from `first` up to `stop`, without `start`; numbers or arrays."""
        return (self.per_token + self.per_read * (first + stop) / 2) * (stop - first)

    def seconds(self, tokens: Any, cached: Any) -> Any:
        """Return the seconds of prefills of `tokens` tokens, `cached` of which are cached; numbers or arrays."""
        return self.start + self.work(cached, cached + tokens)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Time of some requests' prefills, in GPU-hours, with its cost if a price is known."""

    mean_seconds: float | None
    """Mean seconds of a prefill, alone on its GPUs; None if there are none."""
    p50_seconds: float | None
    p95_seconds: float | None
    gpu_hours: float
    """GPU-hours of all prefills."""
    saved_gpu_hours: float
    """Further GPU-hours that they would have taken without reuse."""
    cost_per_hour: float | None
    """Cost of `gpu_hours`, per hour of the requests' own time; None if there is no price, or no time."""
    saved_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Pricing:
    """Conversion of prefill seconds to GPU-hours and cost."""

    model: PrefillModel
    gpus: int = 1
    """GPUs that compute a prefill together."""
    price: float | None = None
    """Price of a GPU per hour."""
    currency: str = "USD"

    def gpu_hours(self, seconds: float) -> float:
        """Return the GPU-hours of `seconds` of prefills."""
        return seconds * self.gpus / _HOUR

    def per_hour(self, gpu_hours: float, hours: float | None) -> float | None:
        """Return the cost per hour of GPU-hours used within `hours`; None if there is no price, or no time."""
        return None if self.price is None or not hours else gpu_hours * self.price / hours

    def cost(
        self, seconds: Seconds, saved: float, hours: float | None, *, extra_seconds: float = 0.0
    ) -> PrefillCost:
        """Return the cost of prefills that took `seconds` each and came within `hours`.

        `saved` are the seconds saved by reuse, `besides` the seconds of other computation.
        """
        spent, kept = self.gpu_hours(float(seconds.sum()) + extra_seconds), self.gpu_hours(saved)
        costs = spent, kept, self.per_hour(spent, hours), self.per_hour(kept, hours)
        if not len(seconds):
            return PrefillCost(None, None, None, *costs)
        half, most = np.quantile(seconds, (0.5, 0.95)).tolist()
        return PrefillCost(float(seconds.mean()), half, most, *costs)

    def of_prompts(
        self, tokens: npt.ArrayLike, reused: npt.ArrayLike, hours: float | None, *, again: npt.ArrayLike = ()
    ) -> PrefillCost:
        """Return the cost of requests with `tokens` prompt tokens each, of which the leading `reused` ones were reused.

        `again` are alternating tokens and reused tokens of prompts that were computed again and are no requests.
        """
        lengths, cached = np.asarray(tokens, np.float64), np.asarray(reused, np.float64)
        more = np.asarray(again, np.float64)
        extra_seconds = self.model.seconds(more[::2] - more[1::2], more[1::2]).sum()
        saved = self.model.work(np.zeros_like(cached), cached).sum()
        seconds = self.model.seconds(lengths - cached, cached)
        return self.cost(seconds, float(saved), hours, extra_seconds=float(extra_seconds))

    def to_json(self, hours: float | None) -> dict[str, Any]:
        """Return the assumptions behind the numbers."""
        currency = None if self.price is None else self.currency
        formula = {"formula": str(self.model), "gpus": self.gpus, "hours": hours}
        return {**formula, "price_per_gpu_hour": self.price, "currency": currency}


def hours_between(first: int, last: int) -> float | None:
    """Return the hours between two times in ns; None if no time has passed."""
    return (last - first) / (_HOUR * 1e9) if last > first else None


@dataclass(slots=True)
class PrefillSeconds:
    """Seconds of a log's prefills."""

    each: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each admission."""
    by_reason: Seconds = field(default_factory=lambda: np.zeros(len(Reason)))
    """Seconds to compute the prompt tokens of each `Reason`, even if they were reused."""
    not_loaded: float = 0.0
    """Seconds of tokens that were to be loaded from outside and did not arrive: a part of `each`."""

    def __iadd__(self, other: PrefillSeconds) -> Self:
        self.each += other.each
        self.by_reason = self.by_reason + other.by_reason
        self.not_loaded += other.not_loaded
        return self

    @property
    def saved(self) -> float:
        """Seconds that the reused tokens would have taken."""
        return float(self.by_reason[: Reason.PARTIAL + 1].sum())

    @property
    def evicted(self) -> float:
        """Seconds of tokens computed again because of evictions."""
        return float(self.by_reason[list(EVICTIONS)].sum())

    @property
    def lost(self) -> float:
        """Seconds of tokens computed again because they had been cleared or lost."""
        return float(self.by_reason[list(LOSSES)].sum())

    def cost(self, pricing: Pricing, hours: float | None) -> PrefillCost:
        """Return the cost."""
        return pricing.cost(np.array(self.each), self.saved, hours)

    def to_json(self, pricing: Pricing, hours: float | None) -> dict[str, Any]:
        """Return everything, with the GPU-hours of each reason."""
        hours_by_reason = (pricing.gpu_hours(seconds) for seconds in self.by_reason.tolist())
        by_reason = {reason.label: each for reason, each in zip(Reason, hours_by_reason, strict=True)}
        return {**asdict(self.cost(pricing, hours)), "gpu_hours_by_reason": by_reason}


@dataclass(frozen=True, slots=True)
class Spending:
    """Prefills of one log or of several, with their pricing."""

    pricing: Pricing
    seconds: PrefillSeconds
    hours: float | None
    """Hours of the logs; None if no time has passed."""

    @property
    def cost(self) -> PrefillCost:
        """Cost of all prefills."""
        return self.seconds.cost(self.pricing, self.hours)

    def spent(self, seconds: float) -> tuple[float, float | None]:
        """Return GPU-hours for `seconds` of prefills, and their cost per hour."""
        gpu_hours = self.pricing.gpu_hours(seconds)
        return gpu_hours, self.pricing.per_hour(gpu_hours, self.hours)


class PrefillTotals(HistoryListener):
    """Listener that sums up prefill seconds while it listens."""

    def __init__(self, model: PrefillModel) -> None:
        self._model = model
        self._seconds = PrefillSeconds()
        self._numbers = array("q")
        """Admission numbers of the entries of `each`."""
        self._loads: dict[int, int] = {}
        """End of the loaded part, by admission number."""
        self._late = defaultdict[int, float](float)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Record the end of the loaded part, since loading may fail in the same batch."""
        if admission.external:
            self._loads[admission.number] = admission.reused + admission.external

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Add a prompt."""
        seconds = seconds_by_reason(self._model, admission)
        self._seconds.by_reason += seconds
        self._seconds.each.append(self._model.start + float(seconds[Reason.EXTERNAL + 1 :].sum()))
        self._numbers.append(admission.number)

    def not_loaded(self, history: HistoryFold, request: RunningRequest, tokens: int) -> None:
        """Add tokens that did not arrive: the last ones to be loaded."""
        stop = self._loads.get(request.number, 0)
        self._loads[request.number] = first = max(stop - tokens, 0)
        self._late[request.number] += self._model.work(first, stop)

    def finish(self) -> PrefillSeconds:
        """Return the seconds."""
        if self._late:
            for at, number in enumerate(self._numbers):
                self._seconds.each[at] += self._late[number]
                self._seconds.not_loaded += self._late[number]
            self._late.clear()
        return self._seconds


def seconds_by_reason(model: PrefillModel, admission: ExplainedAdmission) -> Seconds:
    """Return the seconds to compute the prompt tokens of each reason, even if they were reused."""
    begins, stops, reasons, _ = admission.pieces()
    return np.bincount(reasons, model.work(begins, stops), len(Reason)).astype(np.float64)
