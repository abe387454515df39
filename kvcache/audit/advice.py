"""Advice on a cache from a log or a trace of its requests, with the tokens that each piece would save.

A piece of advice is worth it if it saves `WORTH` of all prompt tokens, or loses as much. Advice for which a log is too
short is left out, with the length that would suffice. Docs: advise.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from events.log import LogReader
from kvcache.audit.block_cache import COMPILED
from kvcache.audit.curve import TIMEOUTS, CurveRecorder, HitCurve, LoggedPrompts, TimeoutCurve
from kvcache.audit.history import HistoryFold
from kvcache.audit.losses import LossCounter, SharedPrefix, SharedPrefixes
from kvcache.audit.policies import POLICIES, Policy, RequestRecorder, Workload
from kvcache.audit.totals import WORTH
from kvcache.audit.volatile import PromptSample, VolatileCount
from kvcache.errors import UsageError
from kvcache.phrases import count, share, span
from kvcache.workload.traces import TracePrompts, TraceRequest

Topic = Literal["volatile", "size", "primary", "host", "policy", "ttl", "pin", "running", "tenant"]
FEWEST = 100
"""Minimum number of requests for any advice."""
_LATE = 0.05
"""Largest part of reuses that come after more than half of a log's time; above it, others may come after its end."""
BETTER = 0.02
"""Least gain in block hit rate for which another eviction order pays."""
_OFTEN = 0.5
"""Part of the admissions at which running requests must fill the cache for it to count as filled."""
_SUFFERS = 2
"""Factor by which a tenant's part of lost tokens must exceed that of the others to count as suffering."""


@dataclass(eq=False, repr=False)
class TooFewRequests(UsageError):
    """A log or a trace has too few requests for any advice."""

    what: str
    requests: int
    seconds: float

    def __str__(self) -> str:
        needed = f": {span(self.seconds * FEWEST / self.requests)} at this rate" if self.seconds else ""
        return (
            f"{self.what} has only {count(self.requests, 'request')} in {span(self.seconds)}; advice needs "
            f"at least {FEWEST}{needed}"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """One action that pays, or that is not needed."""

    topic: Topic
    worth: bool
    saved_tokens: int
    """Prompt tokens that would not be computed, over the whole log; pieces of advice may save the same tokens."""
    about: dict[str, Any]
    """Evidence, as in the JSON of `kvcache advise`."""


class AdviceLine(NamedTuple):
    """A piece of advice, in words."""

    topic: str
    said: str
    proof: str | None
    """Command that proves it; None if there is none."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A question that cannot be answered."""

    topic: Topic
    reason: str
    needed_seconds: float | None = None
    """Length that the log should have, in seconds; None if it is not too short."""


@dataclass(slots=True)
class Observed:
    """Observations from a log or a trace."""

    prompts: LoggedPrompts | TracePrompts
    """Prompts, read to their end."""
    curve: HitCurve
    timeouts: TimeoutCurve
    volatile: VolatileCount | None
    """Part in which otherwise equal prompts differ; None if there is none."""
    compared: int
    """Unit of comparison in tokens: 1, or a block."""
    prefix: SharedPrefix | None
    """Prefix that many prompts share; None if there is none."""
    losses: LossCounter | None = None
    """Cost of evictions in a cache; None if there is no cache."""
    name: str | None = None
    """Name of the last block of `prefix`, in hex."""
    workload: Workload | None = None
    """Requests for other eviction orders; None if there is no cache, or nothing to compile them with."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.prompts.lengths)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(self.prompts.lengths)

    @property
    def tokens_per_block(self) -> int:
        """Tokens per counted block."""
        return self.prompts.tokens_per_block

    @property
    def shared(self) -> bool:
        """True if layers of other kinds take blocks of the same pool."""
        return isinstance(self.prompts, LoggedPrompts) and self.prompts.shared

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.timeouts.seconds

    @property
    def blocks(self) -> int:
        """Blocks of both levels of the cache."""
        return 0 if self.losses is None else self.losses.primary + self.losses.secondary


@dataclass(slots=True)
class Advised:
    """All advice and unanswered questions."""

    advice: list[Advice] = field(default_factory=list)
    left_out: list[Unanswered] = field(default_factory=list)


# -- reading


def observe_log(log: Path, progress: Callable[[int], None] = lambda _: None) -> Observed:
    """Read a log twice, or three times where prompts differ in the middle.

    Raises what `LoggedPrompts` and `HistoryFold` raise, and `TooFewRequests`.
    """
    prompts, recorder, sample = LoggedPrompts(log, progress), CurveRecorder(), PromptSample()
    played = RequestRecorder()
    for event, numbers, at in prompts.numbered():
        if prompts.names is not None:
            raise UsageError(
                f"{log} records no tokens, so that nobody can say why prompts were computed: take a log that was "
                "written with log.record_tokens=true"
            )
        recorder.add(numbers, at)
        if COMPILED:
            played.add(numbers, arrival=at / 1e9)
        sample.add(np.frombuffer(event.tokens, "<i4"))
    _require(str(log), recorder)
    volatile = None
    if (part := sample.part()) is not None:
        volatile = VolatileCount(part, prompts.tokens_per_block)
        for event, numbers, _ in islice(LoggedPrompts(log, progress).numbered(), recorder.prompts):
            volatile.add(event.request_id, event.namespace, np.frombuffer(event.tokens, "<i4"), numbers)
    found = Observed(prompts, recorder.curve(), TimeoutCurve.of(recorder), volatile, 1, None)
    found.workload = played.workload(found.tokens_per_block) if COMPILED else None
    _observe_losses(found, log, prompts.last_seq, progress)
    return found


def observe_trace(
    what: str, read: Callable[[], TracePrompts], play: Callable[[int], AbstractContextManager[Path]] | None
) -> Observed:
    """Read a trace, and once more where prompts differ in the middle.

    Raises what `TracePrompts` and `play` raise, and `TooFewRequests`.

    Args:
        what: Name of the trace in errors.
        read: Opens the trace for reading.
        play: Returns the log of a cache that has served it, for a block size in tokens. None: no cache is known.
    """
    prompts, recorder, prefixes, sample = read(), CurveRecorder(), SharedPrefixes(), PromptSample()
    played, compared = RequestRecorder(), COMPILED and play is not None
    for request, numbers in prompts.numbered():
        sample.unit = 1 if request.tokens is not None else request.block_tokens
        recorder.add(numbers, prompts.at)
        if compared:
            played.add(numbers, arrival=prompts.at / 1e9, stop=request.stop)
        prefixes.add(np.array(numbers, np.intp))
        sample.add(_symbols(request))
    _require(what, recorder)
    volatile = None
    if (part := sample.part()) is not None:
        volatile = VolatileCount(part, prompts.tokens_per_block, sample.unit)
        for number, (request, numbers) in enumerate(read().numbered()):
            volatile.add(number, request.scope, _symbols(request), numbers)
    found = Observed(
        prompts, recorder.curve(), TimeoutCurve.of(recorder), volatile, sample.unit, prefixes.worst()
    )
    found.workload = played.workload(found.tokens_per_block) if compared else None
    if play is not None:
        with play(prompts.tokens_per_block) as log:
            _observe_losses(found, log)
    return found


def _observe_losses(
    found: Observed, log: Path, last: int = sys.maxsize, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Add the cost of evictions in a log, up to a batch."""
    found.losses = losses = LossCounter()
    history = HistoryFold(losses)
    for batch in LogReader(log):
        if batch.seq > last:  # written in the meantime
            break
        history.fold(batch)
        progress(batch.seq)
    found.prefix = losses.prefixes.worst()
    if found.prefix is not None:
        name = history.names["name"][found.prefix.last_block].tobytes()
        found.name = name.hex() if name.strip(b"\0") else None


def _symbols(request: TraceRequest) -> npt.NDArray[np.int64]:
    return np.array(request.hash_ids if request.tokens is None else request.tokens, np.int64)


def _require(what: str, recorder: CurveRecorder) -> None:
    if recorder.prompts < FEWEST:
        raise TooFewRequests(what, recorder.prompts, recorder.seconds)


# -- concluding


def advise(found: Observed, timeout: float) -> Advised:
    """Return all advice; `timeout` is a retention time for idle blocks to consider, in seconds."""
    rules = (_volatile, _size, _primary, _host, _policy, _ttl, _pin, _running, _tenant)
    said = [rule(found, timeout) for rule in rules]
    # If running requests fill the cache, all other advice is secondary.
    advice = sorted(
        (each for each in said if isinstance(each, Advice)),
        key=lambda each: (not (each.worth and each.topic == "running"), -each.saved_tokens),
    )
    return Advised(advice, [each for each in said if isinstance(each, Unanswered)])


TopicResult = Advice | Unanswered


def _volatile(found: Observed, timeout: float) -> TopicResult:
    of = found.volatile
    if of is None or not of.requests:
        return Advice("volatile", False, 0, {"requests": 0, "compared_tokens": found.compared})
    about = {
        "requests": of.requests,
        "compared_tokens": found.compared,
        "position": of.position,
        "shortest": of.shortest,
        "longest": of.longest,
        "values": of.values,
        "alike_tokens": of.alike,
        "request_id": of.example,
    }
    return Advice("volatile", _is_worth(found, of.tokens), of.tokens, about)


def _size(found: Observed, timeout: float) -> TopicResult:
    curve, losses = found.curve, found.losses
    if (lacking := _uncovered("size", found)) is not None:
        return lacking
    knee = curve.knee or 0
    about: dict[str, Any] = {"knee_blocks": knee, "knee_hit_rate": curve.hit_rate(knee)}
    if losses is None:
        return Advice("size", True, 0, about | {"verdict": "unknown"})
    if found.shared:
        return Unanswered("size", _SHARED)
    blocks, held = found.blocks, losses.held.most
    gained = _gained(found, knee)
    verdict = "enough"
    if knee > blocks and _pays(found, gained):
        verdict = "larger"
    elif 2 * (knee + held) <= blocks:
        if found.volatile is not None and _is_worth(found, found.volatile.tokens):
            return Unanswered(
                "size",
                "without the differing part in the middle of its prompts the curve would be another one",
            )
        verdict = "smaller"
    about |= {"blocks": blocks, "hit_rate": curve.hit_rate(blocks), "held_blocks": held, "verdict": verdict}
    saved = gained if verdict == "larger" else 0
    return Advice("size", verdict != "enough", saved, about)


def _primary(found: Observed, timeout: float) -> TopicResult:
    if isinstance(losses := _full("primary", found, curve=True), Unanswered):
        return losses
    blocks = 2 * losses.primary
    gained = _gained(found, blocks + losses.secondary)
    return Advice("primary", _pays(found, gained), gained, {"blocks": blocks})


def _host(found: Observed, timeout: float) -> TopicResult:
    """Advise on host memory: the blocks needed to reach the knee, with primary unchanged."""
    if isinstance(losses := _full("host", found, curve=True), Unanswered):
        return losses
    blocks = max((found.curve.knee or 0) - losses.primary, losses.secondary)
    gained = _gained(found, losses.primary + blocks)
    return Advice("host", _pays(found, gained), gained, {"blocks": blocks, "blocks_now": losses.secondary})


def _policy(found: Observed, timeout: float) -> TopicResult:
    """Advise on the eviction order that reuses most in a cache of the current size, by the rule of the curve."""
    if isinstance(losses := _full("policy", found, curve=True), Unanswered):
        return losses
    if (workload := found.workload) is None:
        return Unanswered("policy", "to compare eviction orders takes numba: pip install 'kvcache[simulate]'")
    names = [name for name in POLICIES if name != "lru" and (name != "stop" or workload.knows_stops)]
    hits = {name: int(Policy.named(name).hits(workload, found.blocks).sum()) for name in names}
    best, usual = max(names, key=hits.__getitem__), found.curve.hits(found.blocks)
    gained = max(hits[best] - usual, 0) * found.tokens_per_block
    asked = max(found.curve.block_requests, 1)
    about = {
        "blocks": found.blocks,
        "policy": best,
        "hit_rate": hits[best] / asked,
        "lru_hit_rate": usual / asked,
    }
    better = hits[best] - usual >= BETTER * asked
    return Advice("policy", better and _pays(found, gained), gained if better else 0, about)


def _ttl(found: Observed, timeout: float) -> TopicResult:
    if found.seconds < 2 * timeout:
        reason = f"{span(found.seconds)} are too short for a timeout of {span(timeout)}"
        return Unanswered("ttl", reason, 2 * timeout)
    if (lacking := _uncovered("ttl", found)) is not None:
        return lacking
    curve, size = found.timeouts, found.tokens_per_block
    lost = {seconds: (curve.hits() - curve.hits(seconds)) * size for seconds in (*TIMEOUTS, timeout)}
    enough = min((each for each in TIMEOUTS if not _is_worth(found, lost[each])), default=None)
    worth = _is_worth(found, lost[timeout])
    about = {"seconds": timeout, "lost_tokens": lost[timeout], "enough_seconds": enough}
    return Advice("ttl", worth, lost[timeout] if worth else 0, about)


def _pin(found: Observed, timeout: float) -> TopicResult:
    prefix = found.prefix
    if prefix is None:
        return Advice("pin", False, 0, {"prefix_tokens": 0})
    losses = found.losses
    about: dict[str, Any] = {
        "prefix_tokens": prefix.blocks * found.tokens_per_block,
        "requests": prefix.requests,
        "asked_tokens": prefix.asked * found.tokens_per_block,
        "request_id": prefix.first if losses is None else losses.request_ids[prefix.first],
        "name": found.name,
        "lost_tokens": None if losses is None else prefix.lost,
        "primary_share": None if losses is None else prefix.blocks / losses.primary,
    }
    if losses is None:
        return Advice("pin", False, 0, about)
    if (lacking := _never_full("pin", found, losses)) is not None:
        return lacking
    fits = 2 * prefix.blocks <= losses.primary and not _is_filled(found, losses)
    worth = fits and _is_worth(found, prefix.lost)
    return Advice("pin", worth, prefix.lost if worth else 0, about)


def _running(found: Observed, timeout: float) -> TopicResult:
    if isinstance(losses := _full("running", found), Unanswered):
        return losses
    held = losses.held
    each = held.blocks / max(held.requests, 1)
    about = {
        "held_blocks": round(held.blocks / held.moments),
        "most_held_blocks": held.most,
        "seq": held.most_at,
        "blocks": losses.primary,
        "running": held.requests / held.moments,
        "full": held.full / held.moments,
        "refusals": losses.refusals,
        "at_a_time": max(int(losses.primary / 2 / each), 1) if each else None,
        "lost_tokens": losses.lost_tokens,
    }
    return Advice("running", _is_filled(found, losses), 0, about)


def _is_filled(found: Observed, losses: LossCounter) -> bool:
    """Return True if several running requests leave so little room that no eviction order could lose less."""
    held = losses.held
    several = held.requests >= 2 * held.moments
    return several and held.full >= _OFTEN * held.moments and _is_worth(found, losses.lost_tokens)


def _tenant(found: Observed, timeout: float) -> TopicResult:
    if isinstance(losses := _full("tenant", found), Unanswered):
        return losses
    tenants = losses.tenants
    if len(tenants) < 2:
        return Advice("tenant", False, 0, {"tenants": len(tenants), "by": next(iter(tenants.values())).by})
    # A tenant that suffers is named before those that lose a larger fraction of few tokens.
    return max((_of_tenant(found, losses, each) for each in tenants), key=_suffering)


def _suffering(advice: Advice) -> tuple[bool, float, int]:
    return advice.worth, advice.about["lost_rate"], advice.about["lost_tokens"]


def _of_tenant(found: Observed, losses: LossCounter, tenant: str) -> Advice:
    own = losses.tenants[tenant]
    others = found.prompt_tokens - own.prompt_tokens
    rate = own.lost / max(own.prompt_tokens, 1)
    usual = (losses.lost_tokens - own.lost) / max(others, 1)
    taken = own.lost - own.lost_to[tenant]
    taker = max(own.lost_to, key=lambda each: own.lost_to[each] if each != tenant else -1) if taken else None
    about = {
        "tenants": len(losses.tenants),
        "tenant": tenant,
        "by": own.by,
        "requests": own.requests,
        "prompt_tokens": own.prompt_tokens,
        "lost_tokens": own.lost,
        "lost_rate": rate,
        "others_lost_rate": usual,
        "lost_to_others_tokens": taken,
        "taker": taker,
    }
    worth = _is_worth(found, taken) and rate >= _SUFFERS * usual and 2 * taken >= own.lost
    return Advice("tenant", worth, taken if worth else 0, about)


# -- thresholds


def _is_worth(found: Observed, tokens: int) -> bool:
    return tokens > 0 and tokens >= WORTH * found.prompt_tokens


def _gained(found: Observed, blocks: int) -> int:
    """Return the tokens that a cache of `blocks` blocks would reuse and the current one would not."""
    return max(found.curve.hits(blocks) - found.curve.hits(found.blocks), 0) * found.tokens_per_block


def _pays(found: Observed, gained: int) -> bool:
    """Return True if more room pays: by the curve, and because evictions did cost as much."""
    return (
        _is_worth(found, gained) and found.losses is not None and _is_worth(found, found.losses.lost_tokens)
    )


_NO_CACHE = "the size of the cache is unknown: give --primary-blocks"
_SHARED = "layers of other kinds share the pool, and a curve covers one kind only"


def _full(topic: Topic, found: Observed, *, curve: bool = False) -> LossCounter | Unanswered:
    """Return the cost of evictions in a cache that was full; with `curve` only if other sizes can be assessed."""
    losses = found.losses
    if losses is None:
        return Unanswered(topic, _NO_CACHE)
    if curve and found.shared:
        return Unanswered(topic, _SHARED)
    lacking = _never_full(topic, found, losses) or (_uncovered(topic, found) if curve else None)
    return losses if lacking is None else lacking


def _never_full(topic: Topic, found: Observed, losses: LossCounter) -> Unanswered | None:
    if losses.evictions or losses.used >= losses.primary:
        return None
    reason = (
        f"the cache was never full: {losses.used:,} of {count(losses.primary, 'block')} were in use at most"
    )
    return Unanswered(topic, reason, found.seconds * losses.primary / max(losses.used, 1))


def _uncovered(topic: Topic, found: Observed) -> Unanswered | None:
    late = found.timeouts.quantile(1 - _LATE)
    if late is None:
        return Unanswered(topic, f"no block was requested twice in {span(found.seconds)}")
    if 2 * late <= found.seconds and found.seconds:
        return None
    reason = (
        f"{share(_LATE)} of the reuses come after {span(late)} or more, too long for {span(found.seconds)}"
    )
    return Unanswered(topic, reason, 4 * late)
