"""How long prefills take by a simple model, what reuse saves of that, and what it costs.

Each token that is computed takes a part for itself and a part for every token that it attends to, so the seconds of a
prompt are the sum over its tokens, and divide among the reasons why they were computed.
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
"""Of a prefill, or of a term for a token: there are none as long."""


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds to compute `n` prompt tokens after `k` that are there: ``a + b n + c n m``, where `m` is ``k + n / 2``.

    `m` is what each of the new tokens reads of those before it, on average: after `k` cached ones the first reads `k`,
    the last ``k + n``.
    """

    start: float
    """`a`: of each prefill, in seconds."""
    per_token: float
    """`b`: seconds."""
    per_read: float
    """`c`: seconds for each token that a token attends to."""

    @classmethod
    def parse(cls, text: str) -> PrefillModel:
        """Read ``a + b n + c n m``; terms may be left out, and have units. Raises `UsageError`."""
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
        """Seconds of the tokens of a prompt from `first` up to `stop`, without `start`; numbers or arrays."""
        return (self.per_token + self.per_read * (first + stop) / 2) * (stop - first)

    def seconds(self, tokens: Any, cached: Any) -> Any:
        """Seconds of prefills of so many tokens after so many that are cached; numbers or arrays."""
        return self.start + self.work(cached, cached + tokens)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What the prefills of some requests take, in GPU-hours, and in money where a price is known."""

    mean_seconds: float | None
    """Of each prefill, alone on its GPUs; None: there are none."""
    p50_seconds: float | None
    p95_seconds: float | None
    gpu_hours: float
    """Of all of them."""
    saved_gpu_hours: float
    """That they would have taken besides if nothing had been reused."""
    cost_per_hour: float | None
    """Money for `gpu_hours`, in each hour of the requests' own time; None: there is no price, or no time."""
    saved_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Pricing:
    """What seconds of a prefill come to."""

    model: PrefillModel
    gpus: int = 1
    """That compute a prefill together."""
    price: float | None = None
    """Of a GPU for an hour."""
    currency: str = "USD"

    def gpu_hours(self, seconds: float) -> float:
        """GPU-hours of so many seconds of prefills."""
        return seconds * self.gpus / _HOUR

    def per_hour(self, gpu_hours: float, hours: float | None) -> float | None:
        """Money for GPU-hours that were used within so many hours; None: no price, or no time."""
        return None if self.price is None or not hours else gpu_hours * self.price / hours

    def cost(
        self, seconds: Seconds, saved: float, hours: float | None, *, besides: float = 0.0
    ) -> PrefillCost:
        """What prefills of so many seconds each cost that came within so many hours.

        `saved` and `besides` are seconds: what was not computed thanks to reuse, and what else was computed.
        """
        spent, kept = self.gpu_hours(float(seconds.sum()) + besides), self.gpu_hours(saved)
        return PrefillCost(
            *_quantiles(seconds), spent, kept, self.per_hour(spent, hours), self.per_hour(kept, hours)
        )

    def of_prompts(
        self, tokens: npt.ArrayLike, reused: npt.ArrayLike, hours: float | None, *, again: npt.ArrayLike = ()
    ) -> PrefillCost:
        """The same of requests with so many prompt tokens, of which so many leading ones were reused.

        `again` are tokens and reused tokens by turns, of prompts that are computed again and are no requests.
        """
        lengths, cached = np.asarray(tokens, np.float64), np.asarray(reused, np.float64)
        more = np.asarray(again, np.float64)
        besides = self.model.seconds(more[::2] - more[1::2], more[1::2]).sum()
        saved = self.model.work(np.zeros_like(cached), cached).sum()
        seconds = self.model.seconds(lengths - cached, cached)
        return self.cost(seconds, float(saved), hours, besides=float(besides))

    def to_json(self, hours: float | None) -> dict[str, Any]:
        """What the numbers rest on."""
        currency = None if self.price is None else self.currency
        formula = {"formula": str(self.model), "gpus": self.gpus, "hours": hours}
        return {**formula, "price_per_gpu_hour": self.price, "currency": currency}


def hours_between(first: int, last: int) -> float | None:
    """Hours from one time to another, both in ns; None: no time has passed."""
    return (last - first) / (_HOUR * 1e9) if last > first else None


def _quantiles(seconds: Seconds) -> tuple[float | None, float | None, float | None]:
    if not len(seconds):
        return None, None, None
    half, most = np.quantile(seconds, (0.5, 0.95)).tolist()
    return float(seconds.mean()), half, most


@dataclass(slots=True)
class PrefillSeconds:
    """Seconds of the prefills of a log."""

    each: array[float] = field(default_factory=lambda: array("d"))
    """Of each admission."""
    by_reason: Seconds = field(default_factory=lambda: np.zeros(len(Reason)))
    """What the prompt tokens of each `Reason` take to compute, whether they were computed or not."""
    not_loaded: float = 0.0
    """Of tokens that were to be loaded from outside and did not come: a part of `each`."""

    def __iadd__(self, other: PrefillSeconds) -> Self:
        self.each += other.each
        self.by_reason = self.by_reason + other.by_reason
        self.not_loaded += other.not_loaded
        return self

    @property
    def saved(self) -> float:
        """What was reused would have taken so long."""
        return float(self.by_reason[: Reason.PARTIAL + 1].sum())

    @property
    def evicted(self) -> float:
        """What was computed again because of evictions."""
        return float(self.by_reason[list(EVICTIONS)].sum())

    @property
    def lost(self) -> float:
        """What was computed again because it had been cleared or lost."""
        return float(self.by_reason[list(LOSSES)].sum())

    def cost(self, pricing: Pricing, hours: float | None) -> PrefillCost:
        """What it costs."""
        return pricing.cost(np.array(self.each), self.saved, hours)

    def to_json(self, pricing: Pricing, hours: float | None) -> dict[str, Any]:
        """All of it, with the GPU-hours of each reason."""
        hours_by_reason = (pricing.gpu_hours(seconds) for seconds in self.by_reason.tolist())
        by_reason = {reason.label: each for reason, each in zip(Reason, hours_by_reason, strict=True)}
        return {**asdict(self.cost(pricing, hours)), "gpu_hours_by_reason": by_reason}


class PrefillTotals(HistoryListener):
    """Adds up what prefills take while it listens."""

    def __init__(self, model: PrefillModel) -> None:
        self._model = model
        self._seconds = PrefillSeconds()
        self._numbers = array("q")
        """Of the admissions in `each`."""
        self._loads: dict[int, int] = {}
        """By number of the admission: where what is loaded ends."""
        self._late = defaultdict[int, float](float)

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Note where what is loaded ends, since it may fail in the same batch."""
        if admission.external:
            self._loads[admission.number] = admission.reused + admission.external

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Add a prompt."""
        seconds = seconds_by_reason(self._model, admission)
        self._seconds.by_reason += seconds
        self._seconds.each.append(self._model.start + float(seconds[Reason.EXTERNAL + 1 :].sum()))
        self._numbers.append(admission.number)

    def not_loaded(self, history: HistoryFold, request: RunningRequest, tokens: int) -> None:
        """Add what did not come: the last of what was to be loaded."""
        stop = self._loads.get(request.number, 0)
        self._loads[request.number] = first = max(stop - tokens, 0)
        self._late[request.number] += self._model.work(first, stop)

    def finish(self) -> PrefillSeconds:
        """All of it."""
        if self._late:
            for at, number in enumerate(self._numbers):
                self._seconds.each[at] += self._late[number]
                self._seconds.not_loaded += self._late[number]
            self._late.clear()
        return self._seconds


def seconds_by_reason(model: PrefillModel, admission: ExplainedAdmission) -> Seconds:
    """What the prompt tokens of each reason take to compute, whether they were or not."""
    size, last, reused = admission.tokens_per_block, admission.num_tokens - 1, admission.reused
    begins = np.arange(len(admission.reasons), dtype=np.float64) * size
    of_blocks = model.work(begins, np.minimum(begins + size, last))
    seconds = np.bincount(admission.reasons, of_blocks, len(Reason)).astype(np.float64)
    # Of blocks that were copied, or are loaded, only in part the rest has another reason.
    loaded = reused + admission.external
    parts = [(Reason.PARTIAL, reused - admission.partial, reused)]
    parts += [(Reason.EXTERNAL, max(loaded - loaded % size, reused), loaded)] * (admission.external > 0)
    for reason, first, stop in parts:
        if first < stop <= last and (own := admission.reasons[first // size]) != reason:
            part = model.work(float(first), float(stop))
            seconds[own] -= part
            seconds[reason] += part
    seconds[Reason.LAST_TOKEN] += model.work(float(last), last + 1.0)
    return seconds
