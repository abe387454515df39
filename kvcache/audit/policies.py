"""Many eviction orders, each at many cache sizes: block requests of a log or a trace, replayed for each combination.

The results are approximate where a running cache differs from the rule of `kvcache.audit.curve`; `kvcache.whatif`
replays the manager.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.audit.block_cache import (
    FIFO,
    HEAPS,
    LEVELS,
    RANK,
    S3FIFO,
    SEGMENTS,
    Order,
    PlayedRequests,
    new_cache,
    play,
    usual_gaps,
)
from kvcache.errors import UsageError

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

FINAL = frozenset({"end_turn", "stop", "stop_sequence", "refusal"})
"""Stop reasons after which a person's turn follows; after others, such as ``tool_use``, a program continues."""
_RETAINED = 600.0
"""Default seconds for which blocks wait for a program."""
_SMALL, _PROTECTED = 0.1, 0.8
"""Parts of the cache: the small queue of S3-FIFO, and the protected segment of SLRU."""
_EVEN_AT = 32_768
"""Number of tokens after which a token costs twice as much as the first one, for a model of 8 billion parameters."""
_AGING, _SHORTEST = 0.7, 0.5
"""Weight of an earlier gap relative to the next one, and shortest gap in seconds, for usual gaps."""


class RequestRecorder:
    """Recorder of consecutive prompts for eviction orders."""

    def __init__(self) -> None:
        self._blocks, self._begins = array("Q"), array("q", [0])
        self._arrivals, self._held = array("d"), array("d")
        self._final = bytearray()
        self.stops = 0
        """PlayedRequests with a stop reason."""

    def add(
        self, blocks: Sequence[int], *, arrival: float = 0.0, held: float = 0.0, stop: str | None = None
    ) -> None:
        """Add the next prompt's full blocks, numbered as for `CurveRecorder`, and the seconds for which it holds them.

        `arrival` is in seconds; one before the last counts as equal to it. `stop` is the stop reason of the output.
        """
        self._blocks.extend(blocks)
        self._begins.append(len(self._blocks))
        self._arrivals.append(arrival)
        self._held.append(held)
        self._final.append(stop in FINAL)
        self.stops += stop is not None

    def workload(self, tokens_per_block: int) -> Workload:
        """Return the requests added so far."""
        begins, blocks = np.array(self._begins), np.array(self._blocks, np.uint64)
        _, firsts, sorted_places = np.unique(blocks, return_index=True, return_inverse=True)
        in_order = np.argsort(firsts)
        places = np.empty(len(in_order), np.int32)
        places[in_order] = np.arange(len(in_order), dtype=np.int32)
        numbers = places[sorted_places]
        depths = np.arange(len(numbers), dtype=np.int32) - np.repeat(begins[:-1], np.diff(begins)).astype(
            np.int32
        )
        before = np.where(depths > 0, np.roll(numbers, 1), -1).astype(np.int32)
        parents, by_block = np.empty(len(places), np.int32), np.empty(len(places), np.int32)
        parents[numbers], by_block[numbers] = before, depths
        arrivals = np.maximum.accumulate(np.array(self._arrivals)) if len(begins) > 1 else np.empty(0)
        ends = arrivals + np.array(self._held)
        requests = PlayedRequests(
            numbers, begins, parents, by_block, _moments(arrivals, ends), arrivals, ends
        )
        final = np.frombuffer(bytes(self._final), np.bool_)
        return Workload(requests, final, tokens_per_block, knows_stops=self.stops > 0)


def _moments(arrivals: Floats, ends: Floats) -> npt.NDArray[np.int64]:
    """Return arrivals and ends in order of time; a request ends before the next one arrives, even at the same time."""
    numbers = np.arange(len(arrivals))
    times, events = np.concatenate([arrivals, ends]), np.concatenate([numbers, ~numbers])
    order = np.lexsort((np.concatenate([2 * numbers, 2 * numbers + 1]), times))
    return np.asarray(events[order], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests to replay, with further facts about them."""

    requests: PlayedRequests
    final: npt.NDArray[np.bool_]
    """Per request: True if its stop reason was final."""
    tokens_per_block: int
    knows_stops: bool

    @property
    def block_requests(self) -> int:
        """Block requests of all prompts."""
        return len(self.requests.blocks)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self.requests.arrivals)

    @property
    def distinct_blocks(self) -> int:
        """Number of distinct blocks."""
        return len(self.requests.parents)


def _order(workload: Workload, kind: int, **given: Any) -> Order:
    """Return an order with neutral values for everything not given."""
    fields = {
        "heaps": np.zeros(workload.prompts, np.int8),
        "splits": np.full(workload.prompts, 2**31 - 1, np.int32),
        "ages": np.full(HEAPS, np.inf),
        "below": np.zeros(HEAPS, np.int8),
        "weights": np.ones(1),
        "part": 0,
    }
    return Order(kind, **{**fields, **given})


def _gdsf(workload: Workload, size: int, parameter: float) -> Order:
    deepest = int(workload.requests.depths.max(initial=0))
    return _order(workload, RANK, weights=1 + np.arange(deepest + 1) * workload.tokens_per_block / parameter)


def _in_parts(kind: int) -> Callable[[Workload, int, float], Order]:
    """Return the order with two parts, of which the parameter is one's share of the cache."""
    return lambda workload, size, parameter: _order(workload, kind, part=max(1, round(size * parameter)))


def _tlru(workload: Workload, size: int, parameter: float) -> Order:
    lengths = np.diff(workload.requests.begins)
    splits = np.maximum(lengths - int(parameter) // workload.tokens_per_block, 0).astype(np.int32)
    return _order(workload, LEVELS, heaps=np.ones(workload.prompts, np.int8), splits=splits)


def _stop(workload: Workload, size: int, parameter: float) -> Order:
    if not workload.knows_stops:
        raise UsageError(
            "no request has a stop reason, which the policy stop needs: use a trace with stop reasons"
        )
    ages = np.full(HEAPS, parameter)
    return _order(workload, LEVELS, heaps=np.where(workload.final, 0, 1).astype(np.int8), ages=ages)


def _gap(workload: Workload, size: int, parameter: float) -> Order:
    usual = np.asarray(usual_gaps(workload.requests, _AGING, _SHORTEST))
    levels = 4 - np.searchsorted([0.4 * parameter, 0.8 * parameter], usual, side="right")
    heaps = np.where(workload.final, 0, levels).astype(np.int8)
    ages = np.array([np.inf, _RETAINED, parameter, parameter, parameter, np.inf])
    return _order(workload, LEVELS, heaps=heaps, ages=ages, below=np.array([0, 0, 1, 1, 1, 0], np.int8))


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """Policy without its parameter."""

    make: Callable[[Workload, int, float], Order]
    parameter: float | None = None
    """Default parameter; None if there is none."""


_KINDS: dict[str, PolicyKind] = {
    "lru": PolicyKind(lambda workload, size, parameter: _order(workload, LEVELS)),
    "fifo": PolicyKind(lambda workload, size, parameter: _order(workload, FIFO)),
    "lfu": PolicyKind(lambda workload, size, parameter: _order(workload, RANK)),
    "gdsf": PolicyKind(_gdsf, _EVEN_AT),
    "slru": PolicyKind(_in_parts(SEGMENTS), _PROTECTED),
    "s3fifo": PolicyKind(_in_parts(S3FIFO), _SMALL),
    "tlru": PolicyKind(_tlru, 4096),
    "stop": PolicyKind(_stop, _RETAINED),
    "gap": PolicyKind(_gap, 20.0),
}
POLICIES = tuple(_KINDS)
"""The names of all."""
_LEAST, _MOST = 1e-9, 1e9
"""The number that a policy takes, be it of tokens, seconds, or a part."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Eviction order: a name of `POLICIES`, optionally with a number after a colon, as in ``stop:300``."""

    name: str
    kind: PolicyKind
    parameter: float

    @classmethod
    def named(cls, name: str) -> Policy:
        """Return the policy of this name. Raises `UsageError`."""
        word, colon, number = name.partition(":")
        kind = _KINDS.get(word)
        if kind is None:
            raise UsageError(f"policy {word!r}: there are {', '.join(POLICIES)}")
        if not colon:
            return cls(name, kind, kind.parameter or 0.0)
        try:
            parameter = float(number)
        except ValueError:
            parameter = np.nan
        if kind.parameter is None or not _LEAST <= parameter <= _MOST:
            numbers = f"a number above 0, from {_LEAST:g} to {_MOST:,.0f}"
            what = "takes no number" if kind.parameter is None else f"takes {numbers}, not {number!r}"
            raise UsageError(f"policy {name!r}: {word} {what}")
        if kind.parameter < 1 <= parameter:
            raise UsageError(f"policy {name!r}: {word} takes a part of the cache, below 1")
        return cls(name, kind, parameter)

    def hits(self, workload: Workload, size: int) -> Int32s:
        """Return the blocks of each request's prompt that a cache of `size` blocks has.

        Raises `UsageError` if the workload lacks data that the policy needs.
        """
        if not workload.prompts:
            return np.empty(0, np.int32)
        size = min(size, workload.distinct_blocks)
        cache = new_cache(size, workload.prompts, workload.distinct_blocks)
        play(cache, workload.requests, self.kind.make(workload, size, self.parameter), size)
        return np.asarray(cache.hits, np.int32)
