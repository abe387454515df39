"""Reasons of prompt tokens, against an oracle written from docs/how-to/audit.md alone, on random logs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from events.types import AdmissionRefused, Gap, SequenceAdded, SequenceRemoved, StateExported
from kvcache.audit import open_log
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.contents import Columns
from kvcache.audit.diff import compare_reuse
from kvcache.audit.explanation import explain_request, views_of
from kvcache.audit.histogram import Ages
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.audit.totals import MOST_USES, audit_batches
from kvcache.errors import UsageError
from kvcache.fold.state import CacheState
from kvcache.manager import KVCacheManager
from kvcache.replay import Replayed
from kvcache.report.charts import GROUPS
from tests.oracles.naive_audit import NaiveAudit
from tests.support.engines import strategies
from tests.support.logs.random_logs import BLIND, LossyLog, random_log
from tests.support.places import ROOT
from tests.support.seeds import seeds


class Admissions(HistoryListener):
    """All of a log."""

    def __init__(self) -> None:
        self.all: list[ExplainedAdmission] = []

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        self.all.append(admission)


def by_token(admission: ExplainedAdmission) -> list[str]:
    """A reason for each token of the prompt."""
    return [reason.label for first, stop, reason, _ in admission.spans() for _ in range(first, stop)]


def compare(log: Path) -> None:
    """The audit agrees with the oracle, token by token, and with itself."""
    admissions = Admissions()
    fold = HistoryFold(admissions)
    for batch in LogReader(log):
        fold.fold(batch)
    judge = NaiveAudit()
    oracle = [each for batch in LogReader(log) for each in judge.batch(batch)]
    for expected, found in zip(oracle, admissions.all, strict=True):
        assert (found.request_id, found.batch) == (expected.request_id, expected.seq)
        assert by_token(found) == expected.reasons
        assert {
            reason.label: int(found.counts[reason]) for reason in Reason if found.counts[reason]
        } == expected.sums
    totals = audit_batches((batch, True) for batch in LogReader(log))
    assert totals.prompt_tokens == sum(len(each.reasons) for each in oracle) == int(totals.reasons.sum())
    assert (totals.reasons == np.sum([each.counts for each in admissions.all], axis=0)).all()
    if judge.knows_all:
        compare_totals(log, judge)
    for expected in oracle[:: max(len(oracle) // 5, 1)]:
        explained = explain_request(LogReader(log), str(expected.request_id))
        stays = [stay for each in explained for stay in each.stays]
        parts = [
            [part.reason.label for part in stay.parts for _ in range(part.first, part.stop)] for stay in stays
        ]
        assert expected.reasons in parts


def compare_totals(log: Path, oracle: NaiveAudit) -> None:
    """What evictions are charged with, and how blocks lived, agree with the oracle: whatever ended their lives."""
    totals = audit_batches(((batch, True) for batch in LogReader(log)), top=1 << 20)
    charged = Counter[tuple[int, int, object]]()
    for (at, gone), tokens in oracle.charged.items():
        charged[oracle.groups[at].window, gone.seq, gone.for_request] += tokens
    assert {(each.window, each.batch, each.for_request): each.tokens for each in totals.worst} == charged
    for reason, level in zip(("evicted", "dropped"), totals.levels, strict=True):
        own = sum(tokens for (_, gone), tokens in oracle.charged.items() if gone.reason == reason)
        assert level.recomputed == own
    assert totals.lost_by_priority.total() == charged.total()
    over = [life for life in oracle.lives if life.ended is not None]
    uses = Counter(min(life.reused, MOST_USES) for life in over)
    assert totals.uses.tolist() == [uses[times] for times in range(MOST_USES + 1)]
    assert totals.never_reused == sum(life.reused == 0 for life in oracle.lives)
    assert totals.stored == oracle.stored
    lifetimes = Ages()
    lifetimes.add(np.array([(life.ended or 0) - life.begun for life in over], np.int64))
    assert (totals.lifetimes.total, list(totals.lifetimes.rows())) == (
        lifetimes.total,
        list(lifetimes.rows()),
    )
    assert totals.lifetimes.quantile(0.5) == lifetimes.quantile(0.5)
    rows = list(open_log(log).block_lives())
    assert sorted(row.reused for row in rows) == sorted(life.reused for life in oracle.lives)


# In 2016 a copy fails in the batch of a clear, behind it.
@pytest.mark.parametrize("seed", seeds(range(24), quick=2, always=[2016, BLIND, BLIND + 1]))
def test_the_audit_agrees_with_the_oracle(seed: int, tmp_path: Path) -> None:
    """Several windows, namespaces, items, offload, lost batches, restarts, logs without tokens."""
    compare(random_log(seed, tmp_path, branches=seed % 2 == 1))


@pytest.mark.parametrize("seed", seeds([3, 10, 25], quick=1))
def test_holders_are_those_of_the_cache(seed: int, tmp_path: Path) -> None:
    """After each batch as many sequences hold each block as by the cache's own state: idle is what none holds."""
    fold, replayed = HistoryFold(), Replayed(CacheState())
    fold.names = Columns(name=(np.uint64, 0))
    for batch in LogReader(random_log(seed, tmp_path, branches=seed % 2 == 1)):
        fold.fold(batch)
        replayed.fold(batch, verify=False)
        fold.names.reach(len(fold.contents))
        for index, window in enumerate(fold.windows):
            ids = np.flatnonzero(window.of["level"] >= 0)
            columns = (column[ids].tolist() for column in (fold.names["name"], window.of["holders"]))
            held = {name.to_bytes(8, "little"): holders for name, holders in zip(*columns, strict=True)}
            cached = strategies.cached_blocks(replayed.state, index)
            full = {name: block for name, block in cached.items() if block[3] == fold.tokens_per_block}
            assert held == {name: references for name, (_, references, *_) in full.items()}


def test_a_request_whose_admission_was_lost(tmp_path: Path) -> None:
    """Of a request that ran on behind lost batches it is told where it is first seen, and its end; no stay."""
    log = random_log(3, tmp_path)
    events = [(batch.seq, event) for batch in LogReader(log) for event in batch.events]
    reported = {
        event.request_id for _, event in events if isinstance(event, SequenceAdded | AdmissionRefused)
    }
    exported = {
        sequence.handle: (seq, sequence)
        for seq, event in reversed(events)
        if isinstance(event, StateExported)
        for sequence in event.sequences
    }
    ends = {event.handle: (seq, event) for seq, event in events if isinstance(event, SequenceRemoved)}
    unknown = [handle for handle, (_, sequence) in exported.items() if sequence.request_id not in reported]
    assert {handle for handle in unknown if handle in ends}
    for handle in unknown:
        since, sequence = exported[handle]
        [found] = explain_request(LogReader(log), str(sequence.request_id))
        assert (found.request_id, found.stays) == (sequence.request_id, [])
        [ran] = found.exported
        assert (ran.since.batch, ran.num_tokens) == (since, sequence.num_prompt_tokens)
        if handle in ends:
            seq, end = ends[handle]
            assert ran.ended is not None
            assert (ran.ended.batch, ran.tokens_at_end, ran.computed_at_end) == (
                seq,
                end.num_tokens,
                end.computed,
            )
            [words] = views_of(found, str)
            assert f"already running in batch {since:,} (" in words.heading
            assert words.facts[1][1].startswith(f"in batch {seq:,} (")
    with pytest.raises(UsageError, match=r"^no request .* in the log"):
        explain_request(LogReader(log), "nobody")


def test_ids_that_begin_like_the_one_asked_for_are_named(tmp_path: Path) -> None:
    """As those of vLLM, which are the ones that its clients got with something added; a few of them."""
    with KVCacheManager(strategies.config(), log=tmp_path) as manager:
        for number in range(6):
            manager.add_sequence(f"cmpl-7-{number}", [1, 2, 3])
            manager.remove_sequence(f"cmpl-7-{number}")
        manager.flush()
    with pytest.raises(UsageError, match=r"; did you mean 'cmpl-7-0', 'cmpl-7-1', 'cmpl-7-2', 'cmpl-7-3'\?$"):
        explain_request(LogReader(tmp_path), "cmpl-7")


def test_an_earlier_life_is_not_that_of_what_was_stored_in_a_gap(tmp_path: Path) -> None:
    """Stored, evicted, and stored again in batches that were lost: nobody knows by whom, and it was not used before."""
    writer, prompt = LossyLog(tmp_path, fsync="never"), [1, 2, 3, 4, 5]
    with KVCacheManager(strategies.config(), log=writer) as manager:

        def serve(name: str, tokens: list[int], *, store: bool = True) -> None:
            manager.add_sequence(name, tokens)
            manager.store_context_blocks(name, len(tokens) if store else 0)
            manager.remove_sequence(name, store=store)
            manager.flush()

        serve("early", prompt)
        serve("again", prompt)
        serve("crowd", [9] * 16, store=False)
        writer.losing = True
        serve("unseen", prompt)
        writer.losing = False
        manager.flush()
        serve("late", prompt)
    [state] = [
        batch.seq for batch in LogReader(tmp_path) if any(isinstance(event, Gap) for event in batch.events)
    ]
    [found] = explain_request(LogReader(tmp_path), "late")
    part = found.stays[0].parts[0]
    assert (part.reason, part.stop, part.stored_by) == (Reason.PRIMARY, 4, None)
    assert [each.moment.batch for each in part.stored] == [state]
    lives = [life for life in open_log(tmp_path).block_lives() if life.num_tokens == 2][:4]
    assert [(life.stored_by, life.stored_seq == state, life.reused) for life in lives] == [
        ("early", False, 1),
        ("early", False, 1),
        (None, True, 1),
        (None, True, 1),
    ]


@pytest.mark.parametrize("seed", seeds(range(3, 24, 3), quick=1))
def test_all_tools_know_the_same_requests(seed: int, tmp_path: Path) -> None:
    """Rows, explanations, audit and diff agree, also on admissions before a gap in their batch, which nobody has."""
    log = random_log(seed, tmp_path, branches=seed % 2 == 1)
    rows = list(open_log(log).requests())
    known = sorted({row.request_id for row in rows}, key=str)
    for request_id in random.Random(seed).sample(known, min(len(known), 12)):
        found = {each.request_id: each for each in explain_request(LogReader(log), str(request_id))}[
            request_id
        ]
        own = [row for row in rows if row.request_id == request_id]
        assert len(found.stays) == sum(row.admission is not None for row in own)
        assert len(found.exported) == sum(row.admission is None and row.outcome != "refused" for row in own)
    both = compare_reuse(LogReader(log), LogReader(log)).a
    totals = audit_batches((batch, True) for batch in LogReader(log))
    admitted = [row for row in rows if row.admission is not None]
    assert both.requests == totals.requests == len(admitted)
    assert both.reused_tokens == totals.reused == sum(row.reused_tokens or 0 for row in admitted)
    everything = {
        str(event.request_id)
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }
    for request_id in everything - {str(row.request_id) for row in rows}:
        with pytest.raises(UsageError, match="no request"):
            explain_request(LogReader(log), request_id)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_the_audit_agrees_with_the_oracle_on_many_logs(seed: int, tmp_path: Path) -> None:
    """The same, more often."""
    compare(random_log(seed, tmp_path, branches=seed % 2 == 1))


def test_the_docs_name_all_reasons() -> None:
    """docs/how-to/audit.md has a row for each, and people get words for each."""
    docs = (ROOT / "docs" / "how-to" / "audit.md").read_text(encoding="utf-8")
    assert all(f"| `{reason.label}` |" in docs for reason in Reason)
    assert set(IN_WORDS) == set(Reason)


def test_the_docs_say_how_reasons_are_printed() -> None:
    """docs/how-to/audit.md maps each reason to its words, and to the group that pictures have it in."""
    docs = (
        (ROOT / "docs" / "how-to" / "audit.md").read_text(encoding="utf-8").partition("## What is printed")[2]
    )
    groups = {reason: group.name for group in GROUPS for reason in group.reasons}
    for reason in Reason:
        assert f"| `{reason.label}` | {IN_WORDS[reason]} | {groups[reason]} |" in docs
