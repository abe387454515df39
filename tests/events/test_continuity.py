"""The order of messages, without any socket."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.formats.vllm import Message
from events.subscribe import continuity as continuity_module
from events.subscribe.continuity import Continuity, Missed, Received, Restarted, Restated
from tests.support.feeds.messages import message
from tests.support.feeds.publisher import CLEARED, batch


def whole(seq: int, ts: float = 1.0) -> Message:
    """A batch that tells the whole state."""
    return Message(b"kv", seq, batch(CLEARED, ts=ts))


def brief(reports: Iterable[object]) -> list[object]:
    """Received batches as their number, replayed ones as its negative (0 as "-0")."""
    found: list[object] = []
    for report in reports:
        if isinstance(report, Received):
            found.append(f"-{report.seq}" if report.replayed else report.seq)
        else:
            found.append(report)
    return found


def recovered(first: int, last: int) -> Missed:
    return Missed(first, last, recovered=True)


def lost(first: int, last: int) -> Missed:
    return Missed(first, last, recovered=False)


class TestWithoutReplay:
    """Live messages only."""

    def test_begins_with_whatever_comes(self) -> None:
        """Without a wanted start nothing before the first message counts as missed."""
        continuity = Continuity(None, can_ask=False)
        for seq in (7, 8):
            continuity.live(message(seq))
        assert brief(continuity.take()) == [7, 8]

    def test_gap_is_reported_once_before_what_follows(self) -> None:
        """A jump is one report with the exact range; a wanted start counts from there."""
        continuity = Continuity(0, can_ask=False)
        for seq in (2, 3, 7):
            continuity.live(message(seq))
        assert brief(continuity.take()) == [lost(0, 1), 2, 3, lost(4, 6), 7]
        assert continuity.take() == []

    def test_number_that_goes_back_is_a_restart(self) -> None:
        """A lower number is a new life, whose first batches may be missing; so is an equal one."""
        continuity = Continuity(None, can_ask=False)
        for ts, seq in enumerate((5, 6, 0, 1, 1)):
            continuity.live(message(seq, ts=float(ts)))
        assert brief(continuity.take()) == [5, 6, Restarted(6, 0), 0, 1, Restarted(1, 1), lost(0, 0), 1]

    def test_batch_that_cannot_be_read_is_missed(self) -> None:
        """Nonsense takes its number, is reported with the reason, and what follows is no gap."""
        continuity = Continuity(None, can_ask=False)
        continuity.live(message(1))
        continuity.live(Message(b"kv", 2, b"secret"))
        continuity.live(message(3))
        reports = continuity.take()
        assert [type(report) for report in reports] == [Received, Missed, Received]
        missed = reports[1]
        assert isinstance(missed, Missed)
        assert (missed.first, missed.last, missed.recovered) == (2, 2, False)
        assert missed.reason == "the message is not a batch of KV events"


class TestReplay:
    """Gaps that can be filled."""

    def test_start_is_asked_for_at_once(self) -> None:
        """A wanted start is a question before any message; what it brings was not missed."""
        continuity = Continuity(3, can_ask=True)
        assert (continuity.take_request(), continuity.take_request()) == (3, None)
        continuity.answer(message(3))
        continuity.answer(message(4))
        continuity.end_of_replay()
        continuity.live(message(5))
        assert brief(continuity.take()) == ["-3", "-4", 5]

    def test_live_messages_wait_for_the_answer(self) -> None:
        """While the publisher answers nothing live is delivered, and afterwards each batch is there once, in order."""
        continuity = Continuity(None, can_ask=True)
        for seq in (1, 4, 5):
            continuity.live(message(seq))
        assert continuity.take_request() == 2
        assert (brief(continuity.take()), len(continuity.held)) == ([1], 2)
        for seq in (2, 3, 4):
            continuity.answer(message(seq))
        continuity.live(message(6))
        continuity.end_of_replay()
        assert brief(continuity.take()) == ["-2", "-3", "-4", recovered(2, 3), 5, 6]

    def test_more_than_can_be_held_is_asked_for_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While nobody answers only so many wait; the last one shows what was let go, and the next answer has it."""
        monkeypatch.setattr(continuity_module, "HELD_MAX", 3)
        continuity = Continuity(0, can_ask=True)
        assert continuity.take_request() == 0
        for seq in range(10):
            continuity.live(message(seq))
        assert len(continuity.held) == 3
        continuity.end_of_replay(complete=False)
        assert (continuity.take_request(), len(continuity.held)) == (2, 1)
        for seq in range(2, 10):
            continuity.answer(message(seq))
        continuity.end_of_replay()
        continuity.live(message(10))
        assert brief(continuity.take()) == [
            *(0, 1, *(f"-{seq}" for seq in range(2, 10)), recovered(2, 8), 10),
        ]

    def test_answer_counts_beyond_what_is_held(self) -> None:
        """An answer is used up to its end: it may hold the state as of then, which live messages would repeat."""
        continuity = Continuity(0, can_ask=True)
        continuity.live(message(2, ts=1.0))
        continuity.live(message(3, ts=1.0))
        for seq in range(5):
            continuity.answer(message(seq, ts=2.0))
        continuity.end_of_replay()
        continuity.live(message(4, ts=1.0))
        continuity.live(message(5, ts=3.0))
        assert brief(continuity.take()) == ["-0", "-1", "-2", "-3", "-4", 5]

    def test_answer_that_begins_late(self) -> None:
        """What the publisher has forgotten is lost, what it still had is recovered, each with its range."""
        continuity = Continuity(None, can_ask=True)
        continuity.live(message(0))
        continuity.live(message(10))
        for seq in (4, 5, 8, 9, 10):
            continuity.answer(message(seq))
        continuity.end_of_replay()
        assert brief(continuity.take()) == [
            *(0, lost(1, 3), "-4", "-5", recovered(4, 5), lost(6, 7), "-8", "-9", "-10", recovered(8, 9)),
        ]

    def test_answer_that_ends_early(self) -> None:
        """If the answer stops short, the rest is asked for once more, and lost if that brings nothing."""
        continuity = Continuity(None, can_ask=True)
        continuity.live(message(0))
        continuity.live(message(5))
        assert continuity.take_request() == 1
        continuity.answer(message(1))
        continuity.end_of_replay()
        assert continuity.take_request() == 2
        continuity.end_of_replay()
        assert continuity.take_request() is None
        assert brief(continuity.take()) == [0, "-1", recovered(1, 1), lost(2, 4), 5]

    def test_publisher_that_had_nothing_yet_is_asked_again(self) -> None:
        """An empty answer to the first question does not give up what was published afterwards."""
        continuity = Continuity(0, can_ask=True)
        assert continuity.take_request() == 0
        continuity.live(message(2))
        continuity.end_of_replay()
        assert continuity.take_request() == 0
        continuity.answer(message(0))
        continuity.answer(message(1))
        continuity.end_of_replay()
        assert brief(continuity.take()) == ["-0", "-1", recovered(0, 1), 2]

    def test_second_gap_among_the_held(self) -> None:
        """A gap between held messages is asked for when its turn comes."""
        continuity = Continuity(None, can_ask=True)
        for seq in (0, 2, 4):
            continuity.live(message(seq))
        assert continuity.take_request() == 1
        continuity.answer(message(1))
        continuity.end_of_replay()
        assert continuity.take_request() == 3
        continuity.answer(message(3))
        continuity.end_of_replay()
        assert brief(continuity.take()) == [0, "-1", recovered(1, 1), 2, "-3", recovered(3, 3), 4]

    def test_replayed_batch_that_cannot_be_read(self) -> None:
        """Nonsense in an answer is lost, and not said to be recovered."""
        continuity = Continuity(None, can_ask=True)
        continuity.live(message(0))
        continuity.live(message(4))
        continuity.answer(message(1))
        continuity.answer(Message(b"kv", 2, b"nonsense"))
        continuity.answer(message(3))
        continuity.end_of_replay()
        reports = continuity.take()
        missed = [
            (report.first, report.last, report.recovered) for report in reports if isinstance(report, Missed)
        ]
        assert missed == [(1, 1, True), (2, 2, False), (3, 3, True)]


class TestRestart:
    """A new life of the publisher."""

    def test_restart_asks_from_the_beginning(self) -> None:
        """The first batches of the new life, if they were not heard, are asked for."""
        continuity = Continuity(None, can_ask=True)
        continuity.live(message(8))
        continuity.live(message(2))
        assert continuity.take_request() == 0
        continuity.answer(message(0))
        continuity.answer(message(1))
        continuity.end_of_replay()
        assert brief(continuity.take()) == [8, Restarted(8, 2), "-0", "-1", recovered(0, 1), 2]

    def test_restart_after_a_replay(self) -> None:
        """After a replay a low number that is younger than what was replayed is a restart, an older one an echo."""
        continuity = Continuity(0, can_ask=True)
        for seq in range(4):
            continuity.answer(message(seq, ts=5.0))
        continuity.end_of_replay()
        continuity.live(message(3, ts=5.0))
        assert brief(continuity.take()) == ["-0", "-1", "-2", "-3"]
        continuity.live(message(0, ts=6.0))
        assert brief(continuity.take()) == [Restarted(3, 0), 0]


class TestStateSentAgain:
    """A publisher that tells all it has in place of what it once said."""

    def test_an_answer_may_skip_what_the_state_includes(self) -> None:
        """Numbers before a batch that clears are not missing: nobody may ever have used them."""
        continuity = Continuity(0, can_ask=True)
        continuity.live(message(5002))
        for reply in (whole(5000), message(5001)):
            continuity.answer(reply)
        continuity.end_of_replay()
        assert brief(continuity.take()) == ["-5000", "-5001", 5002]

    def test_a_gap_after_a_restart_is_not_said_to_be_recovered(self) -> None:
        """Only numbers that an answer has under their own content are."""
        continuity = Continuity(None, can_ask=True)
        for seq in (7, 4096):
            continuity.live(message(seq))
        assert continuity.take_request() == 8
        for reply in (whole(4094), message(4095), message(4096)):
            continuity.answer(reply)
        continuity.end_of_replay()
        assert brief(continuity.take()) == [7, Restated(8, 4093), "-4094", "-4095", "-4096"]

    def test_a_live_batch_that_clears_ends_a_gap(self) -> None:
        """Nothing is asked for, and nothing is lost."""
        for can_ask in (False, True):
            continuity = Continuity(None, can_ask=can_ask)
            for reported in (message(3), whole(9), message(10)):
                continuity.live(reported)
            assert continuity.take_request() is None
            assert brief(continuity.take()) == [3, Restated(4, 8), 9, 10]

    def test_the_state_under_the_last_number_is_no_restart(self) -> None:
        """A publisher tells it to who connects again; of the same time it says nothing new, of a later one it does."""
        continuity = Continuity(None, can_ask=False)
        for reported in (message(3), message(4, ts=2.0), whole(4, ts=2.0), message(5, ts=3.0)):
            continuity.live(reported)
        assert brief(continuity.take()) == [3, 4, 5]
        continuity.live(whole(5, ts=4.0))
        assert brief(continuity.take()) == [Restarted(5, 5), 5]


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 30), st.booleans())
def test_every_number_is_accounted_for_once(arrives: list[bool], kept: int, can_ask: bool) -> None:
    """Whatever is lost and however much can be replayed, each number is received once or reported as lost, in order."""
    total = len(arrives)
    continuity = Continuity(0, can_ask=can_ask)

    def answer_up_to(last: int) -> None:
        while continuity.take_request() is not None:
            for seq in range(max(0, last + 1 - kept), last + 1):
                continuity.answer(message(seq))
            continuity.end_of_replay()

    for seq in range(total):
        if arrives[seq]:
            continuity.live(message(seq))
        answer_up_to(seq)
    continuity.live(message(total))
    answer_up_to(total)
    accounted: list[int] = []
    for report in continuity.take():
        if isinstance(report, Received):
            accounted.append(report.seq)
        elif isinstance(report, Missed) and not report.recovered:
            accounted.extend(range(report.first, report.last + 1))
        elif isinstance(report, Missed):
            assert set(range(report.first, report.last + 1)) <= set(accounted)
        else:
            raise AssertionError(report)
    assert accounted == list(range(total + 1))
