"""Fit of the prefill model to measurements: rows of a table, or steps of a log."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from events import types as ev
from events.log import LogReader
from kvcache.audit.prefill import MOST_SECONDS, PrefillModel, Seconds
from kvcache.errors import UsageError
from kvcache.phrases import share

COLUMNS = ("tokens", "cached", "seconds")
_LEAST, _MOST = 1e-3, 0.5
"""Minimum part of a step that the longest prompts take, and maximum median error, for a fit to be meaningful."""
_SHORTEST = 1e-9
"""Minimum seconds of a prefill."""


class PrefillSample(NamedTuple):
    """A measured prefill, or a measured step of an engine."""

    seconds: float
    tokens: int
    """Tokens computed."""
    reads: float
    """Tokens that these attended to, summed over them."""
    decoding: int = 0
    """Number of requests that decoded a token in the same step."""


@dataclass(frozen=True, slots=True)
class FittedPrefill:
    """A fitted model, with its errors."""

    model: PrefillModel
    per_decoding: float
    """Seconds of a step for each request that decodes in it."""
    samples: int
    rms_seconds: float
    """Root mean square of the differences between measurements and model."""
    median_part: float
    """Median of the differences, as a part of the measured values."""


def read_samples(path: Path) -> list[PrefillSample]:
    """Read a CSV file with the columns ``tokens``, ``cached`` and ``seconds``. Raises `UsageError`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        try:
            if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise UsageError(
                    f"{path} has no column {missing[0]}: its first line must name {','.join(COLUMNS)}"
                )
            return [_sample(row, f"{path}, line {rows.line_num}") for row in rows]
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not text in UTF-8: save it as a CSV file in UTF-8") from None
        except csv.Error as error:
            raise UsageError(f"{path}, line {rows.reader.line_num}: not valid CSV: {error}") from None


def _sample(row: dict[str, str], place: str) -> PrefillSample:
    try:
        tokens, cached, seconds = (float(row[name]) for name in COLUMNS)
    except (TypeError, ValueError):
        tokens = cached = seconds = math.nan
    if not (tokens >= 1 and cached >= 0 and _SHORTEST <= seconds <= MOST_SECONDS and tokens + cached < 2**31):
        raise UsageError(
            f"{place}: write numbers: tokens from 1 on, cached ones from 0 on, and seconds from "
            f"{_SHORTEST:g} to {MOST_SECONDS:,.0f}"
        )
    return PrefillSample(seconds, int(tokens), tokens * (cached + tokens / 2))


def logged_samples(log: Path) -> list[PrefillSample]:
    """Return the steps of a log that computed prompts and began as soon as the previous one had ended.

    A batch is a step, and takes the time since the batch before, if requests were running then: otherwise the engine
    may have waited. Raises what `LogReader` raises.
    """
    samples, steps, before = list[PrefillSample](), _Steps(), 0
    for batch in LogReader(log):
        was_busy = bool(steps.left)
        step = steps.follow(batch)
        if was_busy and step is not None and step.tokens and batch.ts > before:
            samples.append(step._replace(seconds=(batch.ts - before) / 1e9))
        before = batch.ts
    return samples


class _Steps:
    """Fold that determines the prompt tokens computed in each step."""

    def __init__(self) -> None:
        self.left: dict[int, tuple[int, int]] = {}
        """By handle of a running sequence: end of its prompt's computed part, and the prompt's length."""

    def follow(self, batch: ev.EventBatch) -> PrefillSample | None:
        """Return the tokens computed in a step; None if unknown."""
        computed = list[tuple[int, int]]()
        prefilling, decoding, known = set[int](), 0, True
        for event in batch.events:
            match event:
                case ev.SequenceAdded():
                    self.left[event.handle] = event.reused + event.reused_external, event.num_tokens
                case ev.ContextComputed():
                    computed += self._compute(event.handle, event.num_tokens)
                    prefilling.add(event.handle)
                case ev.TokensAppended(draft=False):
                    for handle in array("q", event.handles):
                        rest = (
                            list(self._compute(handle, self.left[handle][1])) if handle in self.left else []
                        )
                        computed += rest
                        decoding += not rest and handle not in prefilling
                case ev.SequenceForked():
                    self.left[event.child] = 0, 0
                case ev.SequenceRemoved():
                    self.left.pop(event.handle, None)
                case ev.TransferFailed() | ev.LoadFailed() | ev.SequenceRewound():
                    known = False
                case ev.CacheCreated() | ev.EpochStarted() | ev.Gap() | ev.StateExported():
                    self.left.clear()
                    known = False
        if not known:
            return None
        reads = sum((stop - first) * (first + stop) / 2 for first, stop in computed)
        return PrefillSample(0.0, sum(stop - first for first, stop in computed), reads, decoding)

    def _compute(self, handle: int, stop: int) -> Iterator[tuple[int, int]]:
        """Record that a prompt is computed up to `stop`; yield the newly computed part."""
        first, length = self.left.get(handle, (0, 0))
        stop = min(stop, length)
        if first < stop:
            self.left[handle] = stop, length
            yield first, stop


def fit(samples: Sequence[PrefillSample], where: str) -> FittedPrefill:
    """Return the least-squares model with no negative coefficients; `where` names the samples in errors.

    Raises `UsageError` for samples that differ too little.
    """
    measured = np.array(samples, np.float64).reshape(-1, len(PrefillSample._fields))
    seconds, others = measured[:, 0], measured[:, 1:]
    columns = np.column_stack([np.ones(len(samples)), others])
    scale = np.maximum(np.abs(columns).max(axis=0, initial=0), 1e-300)
    columns = columns / scale
    if len(samples) < 3 or np.linalg.matrix_rank(columns[:, :3]) < 3:
        raise UsageError(
            f"{where} has {len(samples):,} prefills, too similar to fit the cost of a token: "
            "measure prompts of several lengths"
        )
    found = _least_squares(columns, seconds)
    errors = np.abs(columns @ found - seconds)
    start, per_token, per_read, per_decoding = (found / scale).tolist()
    median = float(np.median(errors / seconds))
    if median > _MOST or found[1] + found[2] < _LEAST * found.sum():
        off = f"the best formula is off by {share(median)} (median)"
        raise UsageError(
            f"{where} has times that do not fit the computed tokens: {off}. Times of `kvcache run` are simulated: "
            "measure prefills, or give --prefill"
        )
    return FittedPrefill(
        PrefillModel(start, per_token, per_read),
        per_decoding,
        len(samples),
        float(np.sqrt(np.mean(errors**2))),
        median,
    )


def _least_squares(columns: Seconds, seconds: Seconds) -> Seconds:
    """Return the non-negative factors of the columns, the best over all subsets of columns, of which there are few."""
    best, least = np.zeros(columns.shape[1]), math.inf
    several = range(columns.shape[1])
    for chosen in map(list, chain.from_iterable(combinations(several, number + 1) for number in several)):
        found = np.linalg.lstsq(columns[:, chosen], seconds, rcond=None)[0]
        error = float(np.square(columns[:, chosen] @ found - seconds).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(columns.shape[1]), error
            best[chosen] = found
    return best
