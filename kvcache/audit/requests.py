"""Requests with what became of them, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from events import types as ev
from events.types import Namespace, RequestId
from kvcache.audit.admission import Admission
from kvcache.audit.collecting import Collector
from kvcache.audit.history import History
from kvcache.audit.reasons import Reason
from kvcache.audit.rows import RequestRow
from kvcache.audit.running import Running


@dataclass(slots=True)
class _Refused:
    times: int
    first_ts: int


@dataclass(frozen=True, slots=True)
class _End:
    outcome: str
    output_tokens: int | None = None
    seq: int | None = None
    ts: int | None = None


class Requests(Collector[RequestRow]):
    """A row when a request ends; at the log's end those that run still, and those that were never admitted."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: dict[RequestId, _Refused] = {}
        """Since their last admission."""
        self._running: dict[int, tuple[Admission, _Refused | None]] = {}
        """By number of the admission."""
        self._exported: dict[int, Running] = {}
        """Those that run without an admission in the log, by their number."""
        self._over: list[tuple[Running, _End]] = []
        """In this batch: of its admissions is told at its end."""

    def refused(self, history: History, event: ev.AdmissionRefused) -> None:
        """Count."""
        self._refused.setdefault(event.request_id, _Refused(0, history.now)).times += 1

    def admitted(self, history: History, admission: Admission) -> None:
        """Wait for its end."""
        refused = self._refused.pop(admission.request_id, None)
        self._running[admission.number] = admission, refused
        self._exported.pop(admission.number, None)

    def forked(self, history: History, child: Running) -> None:
        """Without an admission, as those that came with an exported state."""
        self._exported[child.number] = child

    def ended(self, history: History, sequence: Running, event: ev.SequenceRemoved) -> None:
        """Note the end."""
        output = event.num_tokens - sequence.num_prompt_tokens
        outcome = "ended" if event.why == ev.EndReason.FINISHED else str(event.why)
        self._over.append((sequence, _End(outcome, output, history.batch, history.now)))

    def restarted(self, history: History) -> None:
        """What the exported state has not is lost."""
        known = {sequence.number: sequence for sequence in history.running.values()}
        for number in sorted(self._running.keys() - known.keys()):
            self.rows.append(_row(*self._running.pop(number), _End("lost")))
        for number in sorted(self._exported.keys() - known.keys()):
            self.rows.append(_unknown(self._exported.pop(number), _End("lost")))
        self._exported |= {number: known[number] for number in known.keys() - self._running.keys()}

    def batch_ended(self, history: History) -> None:
        """Tell the ends."""
        for sequence, end in self._over:
            self._add(sequence, end)
        self._over.clear()

    def _add(self, sequence: Running, end: _End) -> None:
        known = self._running.pop(sequence.number, None)
        self._exported.pop(sequence.number, None)
        self.rows.append(_unknown(sequence, end) if known is None else _row(*known, end))

    def remaining(self, history: History) -> Iterator[list[RequestRow]]:
        """What runs still, and what was refused to the last."""
        for sequence in history.running.values():
            self._add(sequence, _End("running", sequence.num_tokens - sequence.num_prompt_tokens))
        yield self.take()
        yield [_never(request_id, refused) for request_id, refused in self._refused.items()]


def _row(admission: Admission, refused: _Refused | None, end: _End) -> RequestRow:
    counts = zip(Reason, admission.counts.tolist(), strict=True)
    return RequestRow(
        admission=admission.number,
        request_id=admission.request_id,
        outcome=end.outcome,
        **_fields(admission.namespace),
        refusals=0 if refused is None else refused.times,
        first_refused_ts=None if refused is None else refused.first_ts,
        admitted_seq=admission.batch,
        admitted_ts=admission.at,
        ended_seq=end.seq,
        ended_ts=end.ts,
        prompt_tokens=admission.num_tokens,
        output_tokens=end.output_tokens,
        reused_tokens=admission.reused,
        tokens_by_reason={reason.label: count for reason, count in counts},
    )


def _unknown(sequence: Running, end: _End) -> RequestRow:
    """One that came with an exported state: its admission is not in the log."""
    return _bare(sequence.request_id, end.outcome, sequence.namespace)._replace(
        ended_seq=end.seq,
        ended_ts=end.ts,
        prompt_tokens=sequence.num_prompt_tokens,
        output_tokens=end.output_tokens,
    )


def _never(request_id: RequestId, refused: _Refused) -> RequestRow:
    row = _bare(request_id, "refused", Namespace())
    return row._replace(refusals=refused.times, first_refused_ts=refused.first_ts)


def _bare(request_id: RequestId, outcome: str, namespace: Namespace) -> RequestRow:
    return RequestRow(
        admission=None,
        request_id=request_id,
        outcome=outcome,
        **_fields(namespace),
        refusals=0,
        first_refused_ts=None,
        admitted_seq=None,
        admitted_ts=None,
        ended_seq=None,
        ended_ts=None,
        prompt_tokens=None,
        output_tokens=None,
        reused_tokens=None,
        tokens_by_reason={},
    )


def _fields(namespace: Namespace) -> dict[str, Any]:
    digest = namespace.salt_digest
    return {
        "lora_id": namespace.lora_id,
        "lora_name": namespace.lora_name,
        "salt_digest": None if digest is None else digest.hex(),
        "uses_extra_ids": namespace.uses_extra_ids,
    }
