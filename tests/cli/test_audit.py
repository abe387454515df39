"""`kvcache explain` and `kvcache audit`: what people are told of a log, in a case worked out by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.log import LogReader, LogWriter
from events.log.frames import SEGMENT_HEADER_BYTES
from events.types import BlocksReused, SequenceAdded
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit import explanation
from kvcache.audit.fleet import audit_worker
from kvcache.audit.histogram import Ages
from kvcache.audit.history import EpochClock
from kvcache.audit.reasons import EVICTIONS, Reason
from kvcache.audit.totals import PARTS, Timeline, audit_batches, verdict_on
from kvcache.errors import OutOfBlocks
from kvcache.manager import Substitutes
from kvcache.replay import replay
from kvcache.report.data import read_report_data
from tests.support.commands import Kvcache

SECOND = 10**9
A, B = list(range(100, 113)), list(range(200, 213))
"""Two prompts of three blocks of four tokens, and one token more."""


@pytest.fixture
def evicted(tmp_path: Path) -> Path:
    """A is cached, evicted for B two seconds later, refused while C holds the room, and comes again; 4 blocks."""
    config = KVCacheConfig(
        max_sequence_length=16, tokens_per_block=4, primary_blocks=4, enable_partial_reuse=False
    )
    clock = itertools.count(1_790_000_000 * SECOND, SECOND)
    with KVCacheManager(
        config, log=tmp_path / "log", substitutes=Substitutes(wall_ns=lambda: next(clock))
    ) as manager:
        for name, prompt in (("first", A), ("other", B)):
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, 13)
            manager.flush()
            manager.remove_sequence(name)
            manager.flush()
        manager.add_sequence("holder", [9] * 16)
        with pytest.raises(OutOfBlocks):
            manager.add_sequence("again", A)
        manager.flush()
        manager.remove_sequence("holder")
        manager.add_sequence("again", A)
        manager.flush()
    return tmp_path / "log"


def test_explain_reports_who_evicted_it_and_when(kvcache: Kvcache, evicted: Path) -> None:
    """Of the request that came too late: its refusal, and why it computed everything."""
    done = kvcache("explain", evicted, "--request", "again")
    assert done.code == 0
    assert "request again: refused in batch 5 (+5.000s)" in done.out
    assert "4 blocks, 0 available" in done.out
    assert "1 request; most blocks: holder (4)" in done.out
    assert "13 prompt tokens, admitted in batch 6 (+6.000s)" in done.out
    [row] = [line for line in done.out.splitlines() if line.split()[:2] == ["0–2", "0–11"]]
    assert "evicted from primary" in row
    assert "3.00 s before, in batch 3 (+3.000s), to make room for request other" in row
    assert "stored by request first in batch 1 (+1.000s)" in row


def test_audit_charges_the_eviction(kvcache: Kvcache, evicted: Path) -> None:
    """Twelve tokens computed again, by the eviction for the other prompt."""
    found = json.loads(kvcache("audit", evicted, "--json").out)
    reasons = {reason: tokens for reason, tokens in found["reasons"].items() if tokens}
    assert reasons == {"last_token": 4, "unaligned": 3, "evicted": 12, "never_seen": 36}
    assert (found["requests"], found["refusals"], found["prompt_tokens"]) == (4, 1, 55)
    [worst] = found["evictions"]["worst"]
    assert (worst["seq"], worst["for_request"], worst["recomputed_tokens"]) == (3, "other", 12)
    assert found["evictions"]["recomputed_tokens"] == 12
    assert found["blocks"]["never_reused"] == found["blocks"]["stored"]
    text = kvcache("audit", evicted).out
    assert "12 tokens, because they were evicted" in text
    assert "of idle blocks" not in text
    assert "too small: 12 tokens were computed again after eviction, 21.8 % of all" in text
    assert found["levels"]["primary"]["verdict"] == "too_small"


def test_audit_from_one_moment_to_another(kvcache: Kvcache, evicted: Path) -> None:
    """What was before is known, but not counted."""
    found = json.loads(kvcache("audit", evicted, "--since", "+6", "--json").out)
    assert (found["requests"], found["reasons"]["evicted"], found["first_seq"]) == (1, 12, 6)
    for end in (99, "+99h"):  # beyond the end it is the end, as for `events`
        found = json.loads(kvcache("audit", evicted, "--until", end, "--json").out)
        assert (found["requests"], found["end"]["kind"]) == (4, "clean")
        assert kvcache("events", evicted, "--until", end).code == 0
    assert kvcache("events", evicted, "--at", "+99h").code == kvcache("replay", evicted, "--at", 99).code == 2
    found = json.loads(kvcache("audit", evicted, "--until", 3, "--json").out)
    assert (found["requests"], found["reasons"]["evicted"], found["last_seq"]) == (2, 0, 3)


def test_audit_of_a_run_agrees_with_its_summary(kvcache: Kvcache, log: Path) -> None:
    """Counted in two ways: by the events of admissions, and token by token."""
    found = json.loads(kvcache("audit", log, "--json").out)
    added = [event for batch in LogReader(log) for event in batch.events if isinstance(event, SequenceAdded)]
    assert (
        found["prompt_tokens"] == sum(event.num_tokens for event in added) == sum(found["reasons"].values())
    )
    assert found["reused_tokens"] == sum(event.reused for event in added) > 0
    assert found["prefixes"]
    assert "most reused prefixes" in kvcache("audit", log).out


def test_of_a_log_without_tokens_it_is_said(kvcache: Kvcache, tmp_path: Path) -> None:
    """Reuse is known; why the rest was computed is not."""
    config = KVCacheConfig.model_validate(
        {
            "max_sequence_length": 16,
            "tokens_per_block": 4,
            "primary_blocks": 8,
            "log": {"record_tokens": False},
        }
    )
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name in ("a", "b"):
            manager.add_sequence(name, A)
            manager.store_context_blocks(name, 13)
            manager.flush()
            manager.remove_sequence(name)
    done = kvcache("audit", tmp_path / "log")
    assert "not recorded" in done.out
    found = json.loads(kvcache("audit", tmp_path / "log", "--json").out)
    assert {reason: tokens for reason, tokens in found["reasons"].items() if tokens} == {
        "primary": 12,
        "last_token": 2,
        "unknown": 12,
    }
    assert "reused from primary" in kvcache("explain", tmp_path / "log", "--request", "b").out


def test_an_empty_log_has_nothing_to_audit(kvcache: Kvcache, evicted: Path, tmp_path: Path) -> None:
    """It says so, as the other commands do."""
    (tmp_path / "empty").mkdir()
    [segment] = evicted.glob("*.kvlog")
    (tmp_path / "empty" / segment.name).write_bytes(segment.read_bytes()[:SEGMENT_HEADER_BYTES])
    done = kvcache("audit", tmp_path / "empty")
    assert (done.code, done.out) == (2, "")
    assert "has no batches yet" in done.err


@given(
    st.lists(st.integers(1_000, 10**15), min_size=1, max_size=200)
    | st.integers(10**6, 10**14).flatmap(
        lambda age: st.lists(
            st.sampled_from([age + age * part // 100 for part in range(12)]), min_size=1, max_size=50
        )
    ),
    st.sampled_from([0.1, 0.5, 0.9]),
)
def test_ages_are_nearly_exact(durations: list[int], part: float) -> None:
    """Quantiles are at most 2.4 % off the exact ones, however they are counted."""
    ages = Ages()
    for number in range(3):
        ages.add(np.array(durations[number::3], np.int64))
    found = ages.quantile(part)
    exact = np.quantile(durations, part, method="inverted_cdf") / 1e9
    assert found == pytest.approx(exact, rel=0.024)
    assert ages.total == len(durations) == sum(blocks for _, blocks in ages.rows())


def test_equal_ages_are_exact() -> None:
    """Where a clock goes in steps of 20 ms, nothing else is said; the clock may go back."""
    ages = Ages()
    ages.add(np.array([20_000_000] * 7 + [-5]))
    assert [ages.quantile(part) for part in (0.1, 0.5, 0.9)] == [0.0, 0.02, 0.02]
    assert [edge for edge, _ in ages.rows()] == [0.001, pytest.approx(0.0251, rel=0.01)]


def test_a_timeline_keeps_its_sums() -> None:
    """However long it becomes, and wherever its clock goes."""
    timeline = Timeline(1)
    times = [0, 5, 1000, 3, 10**6, -7]
    for at in times:
        timeline.add(at * SECOND, np.array([1]))
    assert int(timeline.rows.sum()) == len(times)
    assert len(timeline.rows) <= PARTS
    assert timeline.width * PARTS > 10**6 * SECOND


def served_one_after_the_other(place: Path, prompts: list[list[int]], **settings: object) -> Path:
    """A log of requests one after the other, a second each."""
    given = {"max_sequence_length": 16, "tokens_per_block": 4, "enable_partial_reuse": False, **settings}
    clock = itertools.count(1_790_000_000 * SECOND, SECOND)
    with KVCacheManager(
        KVCacheConfig.model_validate(given), log=place, substitutes=Substitutes(wall_ns=lambda: next(clock))
    ) as manager:
        for number, prompt in enumerate(prompts):
            manager.add_sequence(number, prompt)
            manager.start_transfers()
            manager.poll()
            manager.store_context_blocks(number, len(prompt))
            manager.remove_sequence(number)
            manager.flush()
    return place


class TestVerdict:
    """Whether a level is too small, by what its evictions cost."""

    def test_late_hits_alone_are_no_reason(self, tmp_path: Path) -> None:
        """A is used again and again, B to Z once: hits come as late as evictions, but nothing is lost."""
        prompts = [each for number in range(20) for each in (A, [number * 20] * 13)]
        audit = audit_batches(
            (batch, True)
            for batch in LogReader(served_one_after_the_other(tmp_path / "log", prompts, primary_blocks=8))
        )
        verdict = verdict_on(audit, 0)
        assert verdict is not None
        assert (verdict.size, verdict.recomputed, verdict.hits) == ("large_enough", 0, 3 * 19)
        cost, ages = verdict.in_words()
        assert cost == "large enough: nothing evicted was computed again"
        assert ages.startswith("10 % of 57 hits come after 2.00 s or more, 10 % of ")

    def test_what_secondary_keeps_is_not_lost(self, tmp_path: Path) -> None:
        """Two prompts take turns in a primary level for one of them."""
        small = served_one_after_the_other(tmp_path / "small", [A, B] * 10, primary_blocks=4)
        both = served_one_after_the_other(
            tmp_path / "both", [A, B] * 10, primary_blocks=4, secondary_blocks=8
        )
        found = [audit_batches((batch, True) for batch in LogReader(log)) for log in (small, both)]
        lost, kept = (verdict_on(each, 0) for each in found)
        assert lost is not None
        assert kept is not None
        assert (lost.size, lost.recomputed) == ("too_small", 18 * 12)
        assert (kept.size, kept.recomputed, kept.onboarded) == ("large_enough", 0, 18 * 3)
        assert kept.in_words()[-1].endswith("onboarded again")
        assert verdict_on(found[1], 1) is None

    def test_what_secondary_loses_is_its_own_loss(self, tmp_path: Path) -> None:
        """Four prompts take turns in levels for one each: primary loses nothing, secondary all that it gets."""
        prompts = [A, B, [7] * 13, [8] * 13] * 5
        log = served_one_after_the_other(tmp_path / "log", prompts, primary_blocks=4, secondary_blocks=3)
        audit = audit_batches((batch, True) for batch in LogReader(log))
        primary, secondary = (verdict_on(audit, level) for level in (0, 1))
        assert primary is not None
        assert secondary is not None
        assert (primary.size, primary.recomputed) == ("large_enough", 0)
        assert (secondary.size, secondary.recomputed) == ("too_small", 16 * 12)

    def test_without_tokens_nobody_can_report(self, tmp_path: Path) -> None:
        """What was evicted is known, what it cost is not."""
        log = served_one_after_the_other(
            tmp_path / "log", [A, B], primary_blocks=4, log={"record_tokens": False}
        )
        verdict = verdict_on(audit_batches((batch, True) for batch in LogReader(log)), 0)
        assert verdict is not None
        assert verdict.size == "unknown"
        assert "does not record tokens" in verdict.in_words()[0]


def test_prefixes_stand_in_order_with_names(kvcache: Kvcache, log: Path) -> None:
    """As many as were asked for, the most first, each with a block that `events` finds."""
    lines = kvcache("audit", log, "--top", 3).out.splitlines()
    [head] = [number for number, line in enumerate(lines) if "most reused prefixes" in line]
    rows = [line.split() for line in lines[head + 1 :]]
    served = [int(row[1].replace(",", "")) for row in rows]
    assert len(rows) == 3
    assert served == sorted(served, reverse=True)
    for row in rows:
        assert kvcache("events", log, "--block", row[3], "--type", "BlocksReused").out
    listed = json.loads(kvcache("audit", log, "--top", 3, "--json").out)["prefixes"]
    assert [each["served_tokens"] for each in listed[:3]] == served


def test_what_was_computed_twice(tmp_path: Path) -> None:
    """Two requests compute a prompt side by side: three blocks of the second were cached when it had them."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=12)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name in ("first", "second"):
            manager.add_sequence(name, A)
        for name in ("first", "second"):
            manager.store_context_blocks(name, 13)
        manager.flush()
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert audit.computed_twice == 12
    assert audit_worker(tmp_path / "log").audit.computed_twice == 12


def test_slots_are_reported_as_they_lie() -> None:
    """Consecutive ones as ranges, others one by one, many cut short."""
    assert explanation._slots((7,)) == "slot 7"
    assert explanation._slots((7, 8, 9, 1004)) == "slots 7–9, 1,004"
    assert explanation._slots((1, 3, 5, 7, 9)) == "slots 1, 3, 5, 7, …"


def test_explain_reports_each_slot(kvcache: Kvcache, tmp_path: Path) -> None:
    """Blocks that lie apart are not told as if they followed each other."""
    log = served_one_after_the_other(tmp_path / "log", [A[:5], B, A, A], primary_blocks=8)
    events = [event for batch in LogReader(log) for event in batch.events]
    [handle] = [e.handle for e in events if isinstance(e, SequenceAdded) and e.request_id == 3]
    reused = [
        slot
        for event in events
        if isinstance(event, BlocksReused) and event.handle == handle
        for slot in np.frombuffer(event.slots, np.int32).tolist()
    ]
    reported = json.loads(kvcache("explain", log, "--request", "3", "--json").out)["requests"][0]["stays"][0]
    assert [slot for each in reported["parts"] for slot in each["slots"]] == reused
    assert len(reused) == 3


class TestEpochs:
    """A log whose clock begins again with each epoch."""

    @pytest.fixture
    def twice(self, tmp_path: Path) -> Path:
        for _ in range(2):
            stamps = Substitutes(wall_ns=itertools.count(1_790_000_000 * SECOND, SECOND).__next__)
            config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=8)
            with (
                LogWriter(tmp_path / "log", resume=(tmp_path / "log").exists()) as log,
                KVCacheManager(config, log=log, substitutes=stamps) as manager,
            ):
                for number in range(5):
                    manager.add_sequence(number, A)
                    manager.remove_sequence(number)
                    manager.flush()
        return tmp_path / "log"

    def test_epochs_lie_after_each_other(self, kvcache: Kvcache, twice: Path) -> None:
        """The second one's admissions are not laid over the first one's, and it is said where it begins."""
        found = json.loads(kvcache("audit", twice, "--json").out)["over_time"]
        admitted = [sum(part.values()) // 13 for part in found["parts"]]
        assert sum(admitted) == 10
        assert max(admitted) <= 2
        [begins] = found["clock_set_back"]
        assert f"the clock was set back in batch {begins:,}" in kvcache("audit", twice).out

    def test_a_clock_that_goes_on_is_left_alone(self) -> None:
        """An epoch that begins later is not shifted; one that begins earlier is, as far as it must."""
        clock = EpochClock()
        clock.begin(100, 0)
        assert [clock.of(at) for at in (100, 200)] == [100, 200]
        clock.begin(300, 5)
        assert clock.of(310) == 310
        clock.begin(50, 9)
        assert [clock.of(at) for at in (50, 60)] == [310, 320]
        clock.begin(1000, 12)
        assert clock.of(1000) == 1000
        assert clock.set_back == [9]


class TestLost:
    """What went otherwise than for want of room."""

    @pytest.fixture
    def lost(self, tmp_path: Path) -> Path:
        """A is served twice, and cleared; served, and lost with a restart; then asked for twice at a time. 9 blocks."""
        config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=9)
        for resume in (False, True):
            writer = LogWriter(tmp_path / "log", resume=resume)
            with KVCacheManager(config, log=writer) as manager:
                if resume:
                    for name in ("left", "right"):
                        manager.add_sequence(name, A)
                    continue
                for name in ("first", "second", "after"):
                    manager.add_sequence(name, A)
                    manager.store_context_blocks(name, 13)
                    manager.remove_sequence(name)
                    if name == "second":
                        manager.clear()
        return tmp_path / "log"

    def test_nothing_is_put_down_to_evictions(self, kvcache: Kvcache, lost: Path) -> None:
        """There were none: neither the totals nor an explanation say so."""
        found = json.loads(kvcache("audit", lost, "--json").out)
        again = {"cleared": 12, "restarted": 12, "computing_restarted": 12}
        assert {name: tokens for name, tokens in found["reasons"].items() if tokens} == again | {
            "primary": 12,
            "never_seen": 12,
            "last_token": 5,
        }
        assert (found["evictions"]["recomputed_tokens"], found["evictions"]["worst"]) == (0, [])
        out = kvcache("audit", lost).out
        assert "0 tokens, because they were evicted" in out
        assert "36 tokens, because they were cleared or lost" in out
        assert "evicted" not in kvcache("explain", lost, "--request", "right").out

    def test_lives_end_with_the_cache(self, lost: Path) -> None:
        """Three blocks were reused once before they were cleared, three never before they were lost."""
        audit = audit_batches((batch, True) for batch in LogReader(lost))
        assert (audit.stored, audit.never_reused, audit.uses.tolist()) == (6, 3, [3, 3, 0, 0, 0])
        assert audit.lifetimes.total == 6

    def test_the_report_has_them_apart(self, lost: Path) -> None:
        """In lanes, and so in the choice of whom to explain, they are beside evictions, not among them."""
        lanes = {lane.request_id: lane for lane in read_report_data(lost).lanes}
        assert lanes["right"].by_kind == (0, 0, 0, 12, 1)
        assert lanes["right"].computed_again == 12


def test_of_a_block_that_was_copied_in_part_the_rest_is_charged(tmp_path: Path) -> None:
    """The end of A is evicted; of its third block two tokens are copied from one that begins like it."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=5)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name, prompt in (("first", A), ("holder", B), ("like", [*A[:10], 7, 7, 7]), ("again", A)):
            manager.add_sequence(name, prompt)
            manager.store_context_blocks(name, 13)
            manager.remove_sequence(name)
            manager.flush()
    bills = read_report_data(tmp_path / "log").bills
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    evicted = sum(int(audit.reasons[reason]) for reason in EVICTIONS)
    assert audit.reasons[Reason.PARTIAL] > 0
    assert sum(each.tokens for each in audit.worst) == evicted == audit.levels[0].recomputed
    assert sum(audit.lost_by_priority.values()) == evicted == sum(bill.payers.total() for bill in bills)


def test_what_branches_held_is_idle_when_they_have_ended(tmp_path: Path) -> None:
    """A branch holds the blocks of its parent, and is no use of them: the request that comes then is the first."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=9)
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence("first", A)
        manager.store_context_blocks("first", 13)
        manager.fork("first", "branch")
        for name in ("first", "branch"):
            manager.remove_sequence(name)
        manager.flush()
        manager.add_sequence("again", A)
        manager.flush()
    audit = audit_batches((batch, True) for batch in LogReader(tmp_path / "log"))
    assert audit.levels[0].hit_ages.total == 3
    assert [prefix.times for prefix in audit.prefixes] == [1]


def test_what_a_pin_holds_is_not_idle(tmp_path: Path) -> None:
    """Two hits while it is pinned, the second after a restart; then one when the pin is gone."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=9, max_pinned_share=1.0)
    log = tmp_path / "log"

    def serve(manager: KVCacheManager, name: str) -> None:
        manager.add_sequence(name, A)
        manager.store_context_blocks(name, 13)

    with KVCacheManager(config, log=log) as manager:
        serve(manager, "first")
        pin = manager.pin("first")
        manager.remove_sequence("first")
        serve(manager, "pinned")
        manager.remove_sequence("pinned")
    with KVCacheManager.resume(replay(log).state, log=LogWriter(log, resume=True)) as manager:
        serve(manager, "pinned still")
        manager.remove_sequence("pinned still")
        manager.unpin(pin)
        serve(manager, "idle")
    audit = audit_batches((batch, True) for batch in LogReader(log))
    assert (audit.reused, audit.levels[0].hit_ages.total) == (36, 3)


def test_joined_parts_know_when_each_block_was_stored(tmp_path: Path, kvcache: Kvcache) -> None:
    """A prompt of two blocks, then one that decoding fills in batch 5: one part, in batches 1 to 5."""
    config = KVCacheConfig(max_sequence_length=32, tokens_per_block=4, primary_blocks=9)
    clock = itertools.count(1_790_000_000 * SECOND, SECOND)
    with KVCacheManager(
        config, log=tmp_path / "log", substitutes=Substitutes(wall_ns=lambda: next(clock))
    ) as manager:
        manager.add_sequence("chat", range(8))
        manager.store_context_blocks("chat", 8)
        manager.flush()
        for token in range(8, 14):
            manager.add_tokens(["chat"], [token])
            manager.flush()
        manager.remove_sequence("chat")
        manager.flush()
        manager.add_sequence("turn", range(13))
    done = kvcache("explain", tmp_path / "log", "--request", "turn", "--time", "utc")
    [row] = [line for line in done.out.splitlines() if "stored by request chat" in line]
    found = json.loads(kvcache("explain", tmp_path / "log", "--request", "turn", "--json").out)
    part = found["requests"][0]["stays"][0]["parts"][0]
    assert (part["first_block"], part["last_block"], part["stored_by"]) == (0, 2, "chat")
    first, last = part["stored"]
    assert (first["first_block"], last["first_block"]) == (0, 2)
    assert first["seq"] < last["seq"]
    assert f"in batches {first['seq']} to {last['seq']} (" in row
