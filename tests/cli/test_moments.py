"""Moments of a log: how they are written, which batch each means, and what is said where a log has none."""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentTypeError
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader, LogWriter
from events.types import EventBatch, SequenceAdded, TokensAppended
from kvcache.cli.times import LogPosition, NoBatch, OutsideLog, Times, UpTo, at, span
from kvcache.errors import KVCacheError, UsageError
from kvcache.phrases import iso, since
from kvcache.replay import BeyondEnd
from tests.support.commands import Kvcache, run_log
from tests.support.logs.logs import frames_of

SECOND = 10**9
NEW_YEAR = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * SECOND


NONSENSE = (
    *(
        "",
        "x",
        "-1",
        "1.5s",
        "1,5",
        "12,34",
        "1,2345",
        "+",
        "+x",
        "+-1",
        "+1y",
        "+1h5",
        "+1h5y",
        "+1e3",
        "++1",
        "9" * 19,
        "+" + "9" * 13,
        "\u0661",
    ),
    *("yesterday", "12:30", "2026-01", "2026-13-01", "2026-02-30", "2026-01-01Z", "20260101T000000"),
    *(
        "2026-01-01T25:00",
        "2026-01-01T00:00+25:00",
        "2026-01-01T00:00:00,5",
        "2026-01-01T00:00:00.1234567890",
    ),
)


def batches(*times: float) -> list[EventBatch]:
    """Batches at these seconds of the year 2026, without events."""
    return [EventBatch(seq, NEW_YEAR + round(time * SECOND), ()) for seq, time in enumerate(times)]


def last(log: list[EventBatch], moment: str) -> int:
    """The batch that a moment means."""
    reading = UpTo(log, LogPosition.parse(moment))
    given = [batch.seq for batch in reading]
    reading.check()
    assert given == [batch.seq for batch in log[: len(given)]]
    assert [batch.seq for batch in reading.rest()] == [batch.seq for batch in log[len(given) :]]
    return given[-1]


class TestWriting:
    """Texts."""

    @pytest.mark.parametrize(
        ("text", "kind", "value"),
        [
            ("0", "batch", 0),
            ("600", "batch", 600),
            ("12,224", "batch", 12_224),
            ("1,012,224", "batch", 1_012_224),
            ("10907.2", "batch", 10_907),
            ("10,907.2", "batch", 10_907),
            ("+90", "since", 90 * SECOND),
            ("+5min", "since", 300 * SECOND),
            ("+1h5m", "since", 3900 * SECOND),
            ("+1m1.5s250ms", "since", 61_750_000_000),
            ("+90s", "since", 90 * SECOND),
            ("+5m", "since", 300 * SECOND),
            ("+2h", "since", 7200 * SECOND),
            ("+1d", "since", 86400 * SECOND),
            ("+0.1ms", "since", 100_000),
            ("+0.000000001", "since", 1),
            ("2026-01-01", "time", NEW_YEAR),
            ("2026-01-01T00:00", "time", NEW_YEAR),
            ("2026-01-01 00:00:01", "time", NEW_YEAR + SECOND),
            ("2026-01-01T00:00:01.5Z", "time", NEW_YEAR + SECOND * 3 // 2),
            ("2026-01-01t00:00:01.123456789z", "time", NEW_YEAR + 1_123_456_789),
            ("2026-01-01T01:00:01+01:00", "time", NEW_YEAR + SECOND),
            ("2025-12-31T19:00-05:00", "time", NEW_YEAR),
            ("1969-12-31T23:59:59.9Z", "time", -SECOND // 10),
        ],
    )
    def test_forms(self, text: str, kind: str, value: int) -> None:
        """A batch, a time since the first one, and a time of day, to the nanosecond."""
        moment = LogPosition.parse(text)
        assert (moment.kind, moment.value) == (kind, value)

    @pytest.mark.parametrize("text", NONSENSE)
    def test_nonsense(self, kvcache: Kvcache, log: Path, text: str) -> None:
        """What is no moment is refused, by the library with its own error, by commands in one line."""
        with pytest.raises(ArgumentTypeError, match="not a moment of a log"):
            LogPosition.parse(text)
        done = kvcache("replay", log, f"--at={text}")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert f"{text!r} is not a moment of a log: give a batch" in done.err

    @pytest.mark.parametrize("ts", [0, 1, NEW_YEAR + 1_234_567_890, -1, 2**62, -(2**62)])
    def test_what_is_shown_is_understood(self, ts: int) -> None:
        """The time that JSON has names the same nanosecond."""
        assert LogPosition.parse(iso(ts)).value == ts

    def test_times_for_people(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Since the first batch, below 0 where the clock was set back, or the time of day; cut, never rounded up."""
        monkeypatch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        ts = NEW_YEAR + 12_345_999_999
        assert since(ts, NEW_YEAR) == "+12.345s"
        assert since(NEW_YEAR, ts) == "-12.345s"
        assert since(NEW_YEAR + 5000 * SECOND, NEW_YEAR) == "+5000.000s"
        assert Times("relative", NEW_YEAR).of(ts) == "+12.345s"
        assert Times("utc", NEW_YEAR).of(ts) == "2026-01-01T00:00:12.345Z"
        assert Times("local", NEW_YEAR).of(ts) == "2026-01-01T05:30:12.345+05:30"
        for form in ("utc", "local"):
            assert LogPosition.parse(Times(form).of(ts)).value == ts - 999_999
        monkeypatch.undo()
        time.tzset()


class TestMeaning:
    """Which batch."""

    LOG = batches(0, 1, 1, 2.5, 9)

    @pytest.mark.parametrize(
        ("moment", "seq"),
        [
            ("0", 0),
            ("4", 4),
            ("+0", 0),
            ("+0.999", 0),
            ("+1", 2),
            ("+2499ms", 2),
            ("+2.5", 3),
            ("+8.999999999", 3),
            ("+9", 4),
            ("2026-01-01", 0),
            ("2026-01-01T00:00:01Z", 2),
            ("2026-01-01T02:00:05+02:00", 3),
            ("2026-01-01T00:00:09", 4),
        ],
    )
    def test_last_at_or_before(self, moment: str, seq: int) -> None:
        """A time means the last batch at or before it."""
        assert last(self.LOG, moment) == seq

    def test_clock_set_back(self) -> None:
        """A time means the batch in front of the first later one, whatever the clock showed afterwards."""
        log = batches(0, 5, 2, 6, 4, 8)
        assert [last(log, f"+{time}") for time in (1, 2, 4, 5, 6, 7, 8)] == [0, 0, 0, 2, 4, 4, 5]

    def test_any_clock(self) -> None:
        """Of any times, it is the last one of which no time up to it is later."""
        chance = random.Random(7)
        for _ in range(300):
            times = [0, *(chance.randrange(12) for _ in range(chance.randrange(9)))]
            asked = chance.randrange(max(times) + 1)
            early = [n for n in range(len(times)) if max(times[: n + 1]) <= asked]
            assert last(batches(*times), f"+{asked}") == early[-1]

    @pytest.mark.parametrize(
        ("moment", "error", "text"),
        [
            ("5", BeyondEnd, "batch 5 is after the end of the log, whose last batch is 4"),
            (
                "+9.1",
                OutsideLog,
                "+9.1 is after the log's last batch, 4 (+9.000s, 2026-01-01T00:00:09.000000000Z)",
            ),
            (
                "2025-12-31",
                OutsideLog,
                "2025-12-31 is before the log's first batch, 0 (+0.000s, 2026-01-01T00:00:00.000000000Z)",
            ),
        ],
    )
    def test_outside(self, moment: str, error: type[KVCacheError], text: str) -> None:
        """What lies before the first or behind the last batch is refused with where the log begins or ends."""
        with pytest.raises(error) as caught:
            last(self.LOG, moment)
        assert str(caught.value) == text

    def test_lost_batches(self) -> None:
        """A batch in a gap is not there, though there are later ones; a time in it is the batch before."""
        log = [self.LOG[0], self.LOG[1], self.LOG[4]]
        with pytest.raises(OutsideLog, match=r"batch 3 is in a gap after batch 1 \(\+1\.000s"):
            last(log, "3")
        assert last(log, "+3") == 1

    @pytest.mark.parametrize("moment", ["0", "+0", "2026-01-01"])
    def test_log_without_batches(self, moment: str) -> None:
        """In an empty log no moment is."""
        reading = UpTo([], LogPosition.parse(moment))
        assert list(reading) == []
        with pytest.raises(NoBatch, match="the log has no batches yet"):
            reading.check()

    def test_span(self) -> None:
        """From the first batch at a moment or later, whatever the clock shows then, to the last one before the end."""

        def shown(begin: str | None, end: str | None) -> list[int]:
            log = batches(0, 5, 2, 6, 4, 8)
            given = span(UpTo(log, end and LogPosition.parse(end)), begin and LogPosition.parse(begin))  # type: ignore[arg-type]
            return [batch.seq for batch, within in given if within]

        assert shown(None, None) == shown("0", "5") == shown("2000-01-01", "2100-01-01") == [0, 1, 2, 3, 4, 5]
        assert shown("+1", "+7") == [1, 2, 3, 4]
        assert shown("2", "3") == [2, 3]
        assert shown("4", "99") == [4, 5]
        for begin, end, error in (
            ("+9", None, OutsideLog),
            ("9", None, BeyondEnd),
            (None, "1999-01-01", OutsideLog),
            ("3", "+1", UsageError),
        ):
            with pytest.raises(error):
                shown(begin, end)

    def test_the_batch_at(self) -> None:
        """Of the batches up to a moment, the last one is marked, and no other."""
        assert [within for _, within in at(UpTo(self.LOG, LogPosition.parse("+3")))] == [False] * 3 + [True]


class TestCommands:
    """The options of the commands."""

    @pytest.fixture
    def dated(self, log: Path, tmp_path: Path) -> Path:
        """A log whose batches are a second apart, and the last ten a minute earlier than that."""
        read = list(LogReader(log))
        with LogWriter(tmp_path / "dated") as writer:
            for batch in read:
                second = batch.seq - (60 if batch.seq > read[-1].seq - 10 else 0)
                writer.append(EventBatch(batch.seq, NEW_YEAR + second * SECOND, batch.events))
        return tmp_path / "dated"

    def answer(self, done: Any) -> Any:
        assert done.code == 0, done.err
        return json.loads(done.out)

    @pytest.mark.parametrize("moment", ["40", "+40", "+40.9s", "2026-01-01T00:00:40Z"])
    def test_replay_and_match(self, kvcache: Kvcache, dated: Path, moment: str) -> None:
        """The state at a time is that after its batch, which is said with its time."""
        found = self.answer(kvcache("replay", dated, "--at", moment, "--json"))
        assert found == self.answer(kvcache("replay", dated, "--at", 40, "--json"))
        time = {"seq": 40, "ts": NEW_YEAR + 40 * SECOND, "time": "2026-01-01T00:00:40.000000000Z"}
        assert time.items() <= found.items()
        match = self.answer(kvcache("match", dated, "--request", 3, "--at", moment, "--json"))
        assert time.items() <= match.items()
        assert "after batch 40 (+40.000s)" in kvcache("replay", dated, "--at", moment).out
        shown = kvcache("match", dated, "--request", 3, "--at", moment, "--time", "utc").out
        assert "looked up after batch 40 (2026-01-01T00:00:40.000Z)\n" in shown

    def test_match_of_a_later_request(self, kvcache: Kvcache, dated: Path) -> None:
        """The batch that is read to find the end of a time is not part of it, and an admission in it comes next."""
        admitted = {
            event.request_id: batch.seq
            for batch in LogReader(dated)
            for event in batch.events
            if isinstance(event, SequenceAdded)
        }
        request_id, seq = next(item for item in admitted.items() if item[1] > 20)
        for moment in (seq - 1, f"+{seq - 1}"):
            found = self.answer(kvcache("match", dated, "--request", request_id, "--at", moment, "--json"))
            assert found["seq"] == seq - 1
            assert found["prompt_tokens"] > 0

    def test_the_end_is_reported(self, kvcache: Kvcache, log: Path) -> None:
        """At a time of the last batch the log's end is known, since it was read to know that nothing is later."""
        end = list(LogReader(log))[-1]
        found = self.answer(kvcache("replay", log, "--at", iso(end.ts), "--json"))
        assert (found["seq"], found["end"]["kind"]) == (end.seq, "clean")

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (("--at", "+7.5"), range(7, 8)),
            (("--at", 7), range(7, 8)),
            (("--since", "+6.5", "--until", "+9"), range(7, 10)),
            (("--since", 7, "--until", "2026-01-01T00:00:09.999Z"), range(7, 10)),
            (("--until", 3), range(4)),
            (("--since", "2025-01-01", "--until", "+1"), range(2)),
        ],
    )
    def test_events(self, kvcache: Kvcache, dated: Path, options: tuple[Any, ...], expected: range) -> None:
        """--at, --since and --until choose batches; what people see has the names of requests from before."""
        done = kvcache("events", dated, "--json", *options)
        assert {json.loads(line)["seq"] for line in done.out.splitlines()} == set(expected)
        everything = kvcache("events", dated).out.splitlines()
        reported = [line for line in everything if int(line.split(".")[0]) in expected]
        assert kvcache("events", dated, *options).out.splitlines() == reported

    def test_events_of_a_clock_that_was_set_back(self, kvcache: Kvcache, dated: Path) -> None:
        """Batches that are dated back are shown with what the clock showed, and belong to the time before."""
        end = list(LogReader(dated))[-1].seq
        last_line = kvcache("events", dated).out.splitlines()[-1].split()
        assert last_line[:2] == [f"{end}.0", f"+{end - 60}.000s"]
        done = kvcache("events", dated, "--at", f"+{end - 10}", "--json")
        assert {json.loads(line)["seq"] for line in done.out.splitlines()} == {end}

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--at", 3, "--since", 1), "--at selects one batch"),
            (("--at", 3, "--until", 1), "--at selects one batch"),
            (("--at", 3, "--follow"), "--at selects one batch"),
            (("--since", 9, "--until", 3), "nothing to show: batch 9 is after the given end"),
            (("--until", "2020-01-01"), "2020-01-01 is before the log's first batch, 0"),
        ],
    )
    def test_what_makes_no_sense(
        self, kvcache: Kvcache, log: Path, options: tuple[Any, ...], says: str
    ) -> None:
        """Options that exclude each other, and an end before the beginning, are refused."""
        done = kvcache("events", log, *options)
        assert (done.code, done.out) == (2, "")
        assert says in done.err

    def test_following_ends_at_a_moment(self, kvcache: Kvcache, dated: Path) -> None:
        """With --follow, --until ends the waiting: at its batch, or at the first later one."""
        for moment in (5, "+5"):
            done = kvcache("events", dated, "--follow", "--until", moment, "--json")
            assert json.loads(done.out.splitlines()[-1])["seq"] == 5


def test_a_run_has_the_times_of_its_trace(kvcache: Kvcache, tmp_path: Path) -> None:
    """Each batch of an unpaced run is as late as the requests that it admits, and 20 ms behind the one before."""
    trace = tmp_path / "trace.jsonl"
    arrivals = [0, 3, 5_000, 5_001, 90_000]
    lines = [
        {"timestamp": at, "input_length": 40, "output_length": 3, "hash_ids": [n]}
        for n, at in enumerate(arrivals)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ("--no-pools", "--tokens-per-block", 16, "--concurrency", 1, "-q", "--log", tmp_path / "log")
    assert kvcache("run", trace, *options).code == 0
    read = list(LogReader(tmp_path / "log"))
    admitted = {
        event.request_id: (batch.ts - NEW_YEAR) // 10**6
        for batch in read
        for event in batch.events
        if isinstance(event, SequenceAdded)
    }
    steps = [batch for batch in read if any(isinstance(event, TokensAppended) for event in batch.events)]
    assert min(after.ts - before.ts for before, after in pairwise(steps)) == 20 * 10**6
    assert admitted[2] == 5_000
    assert admitted[4] == 90_000
    assert all(admitted[number] >= arrival for number, arrival in enumerate(arrivals))


def test_equal_runs_write_equal_logs(tmp_path: Path) -> None:
    """The trace's times leave equal runs equal, but for how batches were grouped and what was synced when."""
    first, second = (run_log(tmp_path / name, "--concurrency", 3) for name in "ab")
    assert frames_of(first) == frames_of(second)
