"""Why prompt tokens were computed, against an oracle that is worked out from docs/audit.md alone, on random logs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from events.types import AdmissionRefused, SequenceAdded, SequenceRemoved, StateExported
from kvcache.audit.admission import Admission
from kvcache.audit.explanation import explain_request
from kvcache.audit.fold import HistoryFold
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.audit.totals import audit_batches
from kvcache.errors import UsageError
from tests.conftest import ROOT
from tests.naive_audit import naive_audit
from tests.random_logs import random_log


class Admissions(Listener):
    """All of a log."""

    def __init__(self) -> None:
        self.all: list[Admission] = []

    def admitted(self, history: History, admission: Admission) -> None:
        self.all.append(admission)


def by_token(admission: Admission) -> list[str]:
    """A reason for each token of the prompt."""
    return [reason.label for first, stop, reason, _ in admission.spans() for _ in range(first, stop)]


def compare(log: Path) -> None:
    """The audit agrees with the oracle, token by token, and with itself."""
    admissions = Admissions()
    fold = HistoryFold(admissions)
    for batch in LogReader(log):
        fold.fold(batch)
    oracle = list(naive_audit(LogReader(log)))
    for expected, found in zip(oracle, admissions.all, strict=True):
        assert (found.request_id, found.batch) == (expected.request_id, expected.seq)
        assert by_token(found) == expected.reasons
        assert {
            reason.label: int(found.counts[reason]) for reason in Reason if found.counts[reason]
        } == expected.sums
    totals = audit_batches((batch, True) for batch in LogReader(log))
    assert totals.prompt_tokens == sum(len(each.reasons) for each in oracle) == int(totals.reasons.sum())
    assert (totals.reasons == np.sum([each.counts for each in admissions.all], axis=0)).all()
    for expected in oracle[:: max(len(oracle) // 5, 1)]:
        explained = explain_request(LogReader(log), str(expected.request_id))
        stays = [stay for each in explained for stay in each.stays]
        parts = [
            [part.reason.label for part in stay.parts for _ in range(part.first, part.stop)] for stay in stays
        ]
        assert expected.reasons in parts


@pytest.mark.parametrize("seed", range(24))
def test_the_audit_agrees_with_the_oracle(seed: int, tmp_path: Path) -> None:
    """Several windows, namespaces, items, offload, lost batches, restarts, logs without tokens."""
    compare(random_log(seed, tmp_path))


def test_a_request_whose_admission_was_lost_is_not_known(tmp_path: Path) -> None:
    """Batches that were lost had its admission, so that its end alone is in the log: there is nothing to explain."""
    log = random_log(3, tmp_path)
    events = [event for batch in LogReader(log) for event in batch.events]
    told = {event.request_id for event in events if isinstance(event, SequenceAdded | AdmissionRefused)}
    exported = {
        sequence.handle: sequence.request_id
        for event in events
        if isinstance(event, StateExported)
        for sequence in event.sequences
    }
    ended = {exported.get(event.handle) for event in events if isinstance(event, SequenceRemoved)}
    unknown = ended - told - {None}
    assert unknown
    for request_id in unknown:
        with pytest.raises(UsageError, match="was admitted or refused"):
            explain_request(LogReader(log), str(request_id))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_the_audit_agrees_with_the_oracle_on_many_logs(seed: int, tmp_path: Path) -> None:
    """The same, more often."""
    compare(random_log(seed, tmp_path))


def test_the_docs_name_all_reasons() -> None:
    """docs/audit.md has a row for each, and people get words for each."""
    docs = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    assert all(f"| `{reason.label}` |" in docs for reason in Reason)
    assert set(IN_WORDS) == set(Reason)
