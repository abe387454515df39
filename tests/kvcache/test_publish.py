"""Following a log: where sinks begin and go on, what they get where it has a hole, and what happens when they fail."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest

from events.errors import LogDamaged, NotALog, NotARegularFile, UnsafeFile
from events.log import LogReader
from events.log.reader import LogHead, beginnings
from kvcache.fold.state import resident_names
from kvcache.publish.errors import BeginningRemoved, LogReplaced, NoTokens, NotPublishable
from kvcache.publish.follower import SinkFollower
from kvcache.publish.publisher import Publisher
from sinks import SinkError
from sinks.base import SinkUnavailable, SinkURLError
from sinks.file import FileOptions, FileSink
from tests.support.feeds.publishing import Collector, Reported, Running, once, sinks, write
from tests.support.logs.logs import plain
from tests.support.logs.planted import as_root, plant
from tests.support.ports import free_port
from tests.support.waiting import wait_until

__all__ = ["plain", "sinks"]


def _runs(publisher: Publisher) -> bool:
    return publisher.stats().sinks[0].state == "running"


def _at_end(sink: Collector, log: Path) -> bool:
    """Return whether the sink has the last batch of the log."""
    return sink.seqs[-1:] == [batch.seq for batch in LogReader(log)][-1:]


class TestWhereSinksBegin:
    """A sink gets every batch of the log, once; a feed the state."""

    def test_goes_on_where_it_was(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Several runs together give a sink each batch once, over the epochs of the log."""
        log = tmp_path / "log"
        write(log)
        once(log, "x:a")
        write(log, first=5)
        stats = once(log, "x:a")
        assert sinks["a"].seqs == [batch.seq for batch in LogReader(log)]
        assert sinks["a"].gaps == []
        [lag] = stats.sinks
        assert (lag.lag_batches, lag.state, lag.seq) == (0, "ended", sinks["a"].seqs[-1])

    def test_each_sink_has_its_own_place(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """A sink that comes later gets the log from its beginning."""
        log = tmp_path / "log"
        write(log)
        once(log, "x:a", state_dir=tmp_path / "state")
        once(log, "x:a", "x:b", state_dir=tmp_path / "state")
        assert sinks["a"].seqs == sinks["b"].seqs == [batch.seq for batch in LogReader(log)]
        assert [path.name for path in log.iterdir() if path.suffix == ".json"] == []

    def test_another_log_is_begun_at_its_beginning(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Numbers of another log mean nothing."""
        log = tmp_path / "log"
        write(log)
        once(log, "x:a", state_dir=tmp_path / "state")
        shutil.rmtree(log)
        write(log, 2)
        before = len(sinks["a"].batches)
        once(log, "x:a", state_dir=tmp_path / "state")
        assert sinks["a"].seqs[before:] == [batch.seq for batch in LogReader(log)]

    @pytest.mark.usefixtures("plain")
    def test_batches_that_a_crash_took_back(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Where the next epoch uses their numbers again, the sink gets those of the next epoch."""
        log = tmp_path / "log"
        write(log, close=False)
        shutil.copytree(log, tmp_path / "cut")
        once(log, "x:a", state_dir=tmp_path / "state")
        [segment] = (tmp_path / "cut").glob("*.kvlog")
        segment.write_bytes(segment.read_bytes()[:-10])
        write(tmp_path / "cut", 3)
        second = beginnings(tmp_path / "cut")[1].seq
        before = len(sinks["a"].batches)
        assert second <= sinks["a"].seqs[-1]
        once(tmp_path / "cut", "x:a", state_dir=tmp_path / "state")
        assert sinks["a"].seqs[before:] == list(range(second, sinks["a"].seqs[-1] + 1))

    def test_a_feed_reports_the_state_and_no_history(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """After a restart comes "cleared" and what is resident, and nothing that is not any more."""
        log = tmp_path / "log"
        manager = write(log, 40)
        once(log, "feed:a")
        assert sinks["a"].names == resident_names(manager.state, 0)
        assert sinks["a"].kinds.count("Cleared") == 1
        assert "Removed" not in sinks["a"].kinds
        assert any(
            type(event).__name__ == "BlocksRemoved" for batch in LogReader(log) for event in batch.events
        )

    def test_a_feed_reads_the_last_epoch_only(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Epochs before it may be gone."""
        log = tmp_path / "log"
        write(log)
        manager = write(log, first=5)
        min(log.glob("*.kvlog")).unlink()
        once(log, "feed:a")
        assert sinks["a"].names == resident_names(manager.state, 0) != set()

    def test_what_counts_begins_with_the_epoch(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Each time, and is opened when it has had all; nothing is kept of how far it was."""
        log = tmp_path / "log"
        write(log)
        write(log, first=5)
        epoch = [batch.seq for batch in LogReader(log, start=beginnings(log)[1].seq)]
        for times in (1, 2):
            once(log, "fold:a")
            assert sinks["a"].seqs == epoch * times
            assert sinks["a"].opened == len(sinks["a"].seqs)
        assert list(log.glob("publish-*")) == []

    def test_metrics_of_a_restarted_sidecar(self, tmp_path: Path) -> None:
        """They are those that a sink in the engine's process would have."""
        pytest.importorskip("prometheus_client")
        from urllib.request import urlopen

        log, port = tmp_path / "log", free_port()
        write(log, 5)
        for _ in range(2):
            with Running(log, f"prometheus://127.0.0.1:{port}") as running:
                wait_until(partial(_runs, running.publisher), "no metrics")
                with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                    text = page.read().decode()
            assert 'kvcache_requests_total{model="m"} 5.0' in text


class TestHoles:
    """What of the log is not there, or was not recorded."""

    def test_removed_segments(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """A sink goes on at the next epoch that is there, behind a gap over what it will not get."""
        log = tmp_path / "log"
        write(log, 2)
        write(log, 2)
        second = beginnings(log)[1].seq
        min(log.glob("*.kvlog")).unlink()
        once(log, "x:a")
        assert sinks["a"].gaps == [(0, second - 1)]
        assert sinks["a"].seqs == [second - 1, *(batch.seq for batch in LogReader(log, start=second))]

    def test_segments_removed_while_a_sink_hangs(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """One that is too far behind gets a gap, and goes on."""
        log = tmp_path / "log"
        write(log, 30, segment_bytes=2000)
        sinks["a"] = Collector()
        sinks["a"].gate.clear()
        with Running(log, "x:a"):
            assert sinks["a"].reached.wait(60)
            write(log, 2)
            second = beginnings(log)[1].seq
            for path in sorted(log.glob("*.kvlog"))[:-1]:
                path.unlink()
            sinks["a"].gate.set()
            wait_until(lambda: bool(sinks["a"].gaps), "no gap is told")
            last = [batch.seq for batch in LogReader(log, start=second)][-1]
            wait_until(lambda: sinks["a"].seqs[-1] == last, "it does not go on")
        [(first, gap_last)] = sinks["a"].gaps
        assert gap_last == second - 1
        assert sinks["a"].seqs == [*range(first), second - 1, *range(second, last + 1)]

    def test_the_beginning_of_the_last_epoch_is_gone(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Then nothing can be understood, and the error says what to do."""
        log = tmp_path / "log"
        write(log, 30, segment_bytes=2000)
        min(log.glob("*.kvlog")).unlink()
        for url in ("x:a", "feed:b"):
            with pytest.raises(BeginningRemoved, match="restart the engine"):
                once(log, url)

    def test_damage_makes_routers_forget(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Routers that have been told the state are told "cleared" when what follows cannot be read."""
        log = tmp_path / "log"
        write(log)
        with Running(log, "feed:a") as running:
            wait_until(lambda: "a" in sinks and sinks["a"].names != set(), "nothing is told")
            shutil.copytree(log, tmp_path / "copy")
            write(tmp_path / "copy", 2)
            damaged = max((tmp_path / "copy").glob("*.kvlog"))
            content = bytearray(damaged.read_bytes())
            content[70] ^= 1
            (log / damaged.name).write_bytes(content)
            wait_until(lambda: running.error is not None, "nobody notices")
        assert isinstance(running.error, LogDamaged)
        assert sinks["a"].names == set()

    @pytest.mark.usefixtures("plain")
    def test_a_torn_tail_is_waited_at(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """What the engine's next start cuts off was never told, and what it writes then is."""
        log = tmp_path / "log"
        write(log, close=False)
        [segment] = log.glob("*.kvlog")
        whole = [batch.seq for batch in LogReader(log)]
        shutil.copytree(log, tmp_path / "torn")
        torn = tmp_path / "torn" / segment.name
        torn.write_bytes(torn.read_bytes()[:-10])
        with Running(tmp_path / "torn", "x:a"):
            wait_until(
                lambda: "a" in sinks and sinks["a"].seqs == whole[:-1], "the whole batches do not come"
            )
            write(tmp_path / "torn", 2)
            wait_until(lambda: _at_end(sinks["a"], tmp_path / "torn"), "the next epoch does not come")
        assert sinks["a"].seqs == [batch.seq for batch in LogReader(tmp_path / "torn")]

    def test_a_log_without_tokens(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """A feed refuses it at the start; told of it by a new epoch, routers forget, until one with tokens begins."""
        log = tmp_path / "log"
        write(log)
        with Running(log, "feed:a") as running:
            wait_until(lambda: "a" in sinks and sinks["a"].names != set(), "nothing is told")
            write(log, record_tokens=False)
            wait_until(lambda: sinks["a"].names == set(), "routers do not forget")
            manager = write(log)
            names = resident_names(manager.state, 0)
            wait_until(lambda: sinks["a"].names == names, "the next epoch is not told")
        assert running.error is None
        write(log, record_tokens=False)
        with pytest.raises(NoTokens, match=r"log\.record_tokens"):
            once(log, "feed:b")
        once(log, "x:c")
        assert sinks["c"].seqs == [batch.seq for batch in LogReader(log)]

    def test_a_replaced_log(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Another log in the same place is told as such, and routers forget."""
        log = tmp_path / "log"
        write(log)
        with Running(log, "x:a") as running:
            wait_until(lambda: "a" in sinks and len(sinks["a"].seqs) > 3, "nothing is told")
            log.rename(tmp_path / "old")
            write(log)
            wait_until(lambda: running.error is not None, "nobody notices")
        assert isinstance(running.error, LogReplaced)

    @pytest.mark.parametrize("kind", ["file", "directory"])
    def test_no_log(self, tmp_path: Path, kind: str) -> None:
        """What is no log is not waited for; nor, with until="end", what is not there."""
        place = tmp_path / "log"
        if kind == "file":
            place.write_text("x")
        else:
            place.mkdir()
            (place / "x").write_text("x")
        with pytest.raises(NotALog):
            Publisher(place, ["stdout:"])
        with pytest.raises(NotALog):
            once(tmp_path / "missing", "stdout:")


class TestSinksThatFail:
    """What a sink did not take is offered again; the others do not notice."""

    def test_a_hanging_sink_holds_up_no_other(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """While one hangs, others get everything; it is told as behind, and when it goes on it has lost nothing."""
        log = tmp_path / "log"
        sinks["a"] = Collector()
        sinks["a"].gate.clear()
        with Running(log, "x:a", "x:b", "feed:c") as running:
            manager = write(log, 50, close=False)
            names, last = resident_names(manager.state, 0), manager.stats().batches - 1
            wait_until(lambda: "b" in sinks and sinks["b"].seqs[-1:] == [last], "b is held up")
            wait_until(lambda: sinks["c"].names == names, "c is held up")
            lags = [last + 1, 0, 0]
            wait_until(
                lambda: [lag.lag_batches for lag in running.publisher.stats().sinks] == lags, "lags differ"
            )
            sinks["a"].gate.set()
            wait_until(lambda: sinks["a"].seqs == sinks["b"].seqs, "a does not get what it missed")
        manager.close()

    def test_one_that_hangs_is_given_up_at_the_end(
        self, tmp_path: Path, sinks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Closing waits a while, and for all of them together."""
        timeouts, join = list[float](), SinkFollower.join

        def joining(follower: SinkFollower, timeout: float) -> bool:
            timeouts.append(timeout)  # By so much the clock goes on.
            return join(follower, 0)

        monkeypatch.setattr(SinkFollower, "join", joining)
        log = tmp_path / "log"
        write(log)
        for name in ("a", "b"):
            sinks[name] = Collector()
            sinks[name].gate.clear()
        running = Running(log, "x:a", "x:b", "x:c", clock=lambda: sum(timeouts))
        wait_until(lambda: "c" in sinks and len(sinks["c"].seqs) > 3, "c is held up")
        running.stop()
        assert timeouts[0] > 0
        assert timeouts[1:] == [0, 0]
        for name in ("a", "b"):
            sinks[name].gate.set()

    def test_a_failing_sink_is_tried_until_it_takes(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """It is closed, opened again, and offered the same batch: nothing is lost, and the errors are counted."""
        log = tmp_path / "log"
        write(log)
        sinks["a"] = Collector()
        left = 7

        def fail() -> None:
            nonlocal left
            left -= 1
            if left > 0:
                raise OSError(28, "made up")

        sinks["a"].fail = fail
        with Running(log, "x:a") as running:
            wait_until(lambda: running.publisher.stats().sinks[0].errors > 2, "it does not fail")
            wait_until(lambda: _at_end(sinks["a"], log), "it is not tried again")
            wait_until(lambda: _runs(running.publisher), "it does not run")
            stats = running.publisher.stats().sinks[0]
        assert sinks["a"].seqs == [batch.seq for batch in LogReader(log)]
        assert sinks["a"].opened == 2
        assert (stats.errors, stats.state) == (6, "running")
        assert "made up" in str(stats.last_error)

    def test_one_that_cannot_be_opened_ends_it(self, tmp_path: Path) -> None:
        """At the start, when somebody is there to see it."""
        log = tmp_path / "log"
        write(log)
        with pytest.raises(SinkError, match="does not exist"):
            once(log, f"file:{tmp_path}/missing/e.jsonl")

    @pytest.mark.parametrize("until", ["end", "closed"])
    def test_a_feed_that_cannot_send_has_not_had_it(
        self, tmp_path: Path, sinks: dict[str, Any], until: Literal["end", "closed"]
    ) -> None:
        """Folding is not sending: it is behind while its transport refuses, and is not done before it takes it."""
        log = tmp_path / "log"
        write(log)
        reported = sinks["c"] = Reported()
        send, reported.send = reported.send, Mock(side_effect=SinkError("made up"))  # type: ignore[method-assign]
        with Running(log, "feed:c", until=until) as running:
            wait_until(lambda: running.publisher.stats().sinks[0].errors > 2, "it does not fail")
            [lag] = running.publisher.stats().sinks
            assert (lag.state, lag.seq) == ("failing", -1)
            assert lag.lag_batches == len(list(LogReader(log)))
            reported.send = send  # type: ignore[method-assign]
            running.thread.join(60)
            assert not running.thread.is_alive()
            [lag] = running.publisher.stats().sinks
            assert (lag.lag_batches, running.error) == (0, None)
        assert reported.names

    def test_what_fails_with_the_last_words_is_an_error(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """What a sink held back up to its end, and could not write, was not delivered; it is offered again."""
        log = tmp_path / "log"
        write(log)
        sinks["a"] = Collector()
        sinks["a"].close = Mock(side_effect=OSError(28, "made up"))
        with pytest.raises(SinkError, match="made up"):
            once(log, "x:a")
        sinks["a"].close = Mock()
        once(log, "x:a")
        assert sinks["a"].seqs == [batch.seq for batch in LogReader(log)] * 2

    def test_one_that_does_not_answer_is_waited_for(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """As later, and the others have theirs."""
        log = tmp_path / "log"
        write(log)
        sinks["a"] = Collector()
        opens, sinks["a"].open = sinks["a"].open, Mock(side_effect=SinkUnavailable("nobody is there"))
        with Running(log, "x:a", "x:b") as running:
            wait_until(lambda: "b" in sinks and len(sinks["b"].seqs) > 3, "b is held up")
            [lag, _] = running.publisher.stats().sinks
            assert (lag.state, lag.lag_batches) == ("failing", len(list(LogReader(log))))
            sinks["a"].open = opens
            wait_until(lambda: sinks["a"].seqs == sinks["b"].seqs, "a is not opened")
            assert running.error is None

    def test_what_no_log_can_serve(self, tmp_path: Path) -> None:
        """Wrong URLs are told before the log is waited for, as are plain salts, and two sinks of one name."""
        with pytest.raises(SinkURLError, match="unknown scheme"):
            Publisher(tmp_path / "log", ["zmq:"])
        with pytest.raises(NotPublishable, match="only their digests"):
            Publisher(tmp_path / "log", ["zmq+pub://127.0.0.1:5557?salts=plain"])
        with pytest.raises(NotPublishable, match="identified by scheme"):
            Publisher(tmp_path / "log", ["file:a?tokens=1", "file:a"])

    def test_one_process_per_sink(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """A second publisher of the same sink is refused, and told by whom it is served."""
        log = tmp_path / "log"
        write(log)
        with Running(log, "x:a"):
            wait_until(lambda: "a" in sinks and len(sinks["a"].seqs) > 3, "nothing is told")
            with pytest.raises(
                SinkError, match="is in use by another sink of this process: choose another --state"
            ):
                once(log, "x:a")

    def test_a_damaged_position(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """Nobody guesses what the sink has had."""
        log = tmp_path / "log"
        write(log)
        once(log, "x:a")
        [path] = log.glob("publish-*.json")
        path.write_text(path.read_text()[:-5])
        with pytest.raises(SinkError, match="damaged"):
            once(log, "x:a")

    @pytest.mark.parametrize("position", [{"seq": -2}, {"epoch": -1}, {"seq": "1"}])
    def test_a_position_that_none_can_be(
        self, tmp_path: Path, sinks: dict[str, Any], position: dict[str, Any]
    ) -> None:
        """It is refused as damaged."""
        self._change_position(tmp_path / "log", position)
        with pytest.raises(SinkError, match="damaged"):
            once(tmp_path / "log", "x:a")

    @pytest.mark.parametrize("position", [{"seq": 100}, {"epoch": 3}])
    def test_a_position_after_the_end_of_the_log(
        self, tmp_path: Path, sinks: dict[str, Any], position: dict[str, int]
    ) -> None:
        """A power cut took batches back: an epoch that begins is waited for, and a look at what there is says so."""
        log = tmp_path / "log"
        self._change_position(log, position)
        had = len(sinks["a"].seqs)
        with pytest.raises(SinkError, match="the log ends before batch"):
            once(log, "x:a")
        with Running(log, "x:a") as running:
            wait_until(lambda: running.publisher.stats().sinks[0].waits_for is not None, "it goes on")
            [lag] = running.publisher.stats().sinks
            assert (lag.state, lag.lag_batches) == ("waiting", None)
            if "seq" in position:
                write(log, first=20)
                wait_until(lambda: _at_end(sinks["a"], log), "it does not go on")
        assert sinks["a"].seqs[had:] == [batch.seq for batch in LogReader(log)][had:]

    def test_a_position_that_is_no_file(self, tmp_path: Path, sinks: dict[str, Any]) -> None:
        """A pipe is not waited for."""
        path = self._change_position(tmp_path / "log", {})
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(NotARegularFile):
            once(tmp_path / "log", "x:a")

    @as_root
    @pytest.mark.parametrize("planted", ["state", "file"])
    def test_a_state_of_another_user(self, tmp_path: Path, sinks: dict[str, Any], planted: str) -> None:
        """Neither his directory nor his file says what a sink has had."""
        write(tmp_path / "log")
        plant(tmp_path / "state", None, 0o777)
        if planted == "file":
            os.chown(tmp_path / "state", 0, 0)
            (tmp_path / "state").chmod(0o700)
            once(tmp_path / "log", "x:a", state_dir=tmp_path / "state")
            [path] = (tmp_path / "state").glob("publish-*.json")
            os.chown(path, 65534, 65534)
        with pytest.raises(UnsafeFile, match="another user"):
            once(tmp_path / "log", "x:a", state_dir=tmp_path / "state")

    @staticmethod
    def _change_position(log: Path, position: dict[str, Any]) -> Path:
        write(log)
        once(log, "x:a")
        [path] = log.glob("publish-*.json")
        content = json.loads(path.read_text())
        content["position"] |= position
        path.write_text(json.dumps(content))
        return path

    def test_memory_is_bounded_while_a_sink_hangs(
        self, tmp_path: Path, sinks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a sink is at a batch, no later one is read: the log is the queue."""
        decoded, ahead = 0, list[int]()
        read = LogReader._leased

        def counted(self: LogReader) -> Any:
            nonlocal decoded
            for item in read(self):
                decoded += item is not None and item[1] is not None
                yield item

        monkeypatch.setattr(LogReader, "_leased", counted)
        log = tmp_path / "log"
        write(log, 60)
        sinks["a"] = Collector()
        sinks["a"].fail = lambda: ahead.append(decoded - len(sinks["a"].seqs))
        once(log, "x:a")
        # The first one is read twice: it tells what to begin with.
        assert ahead == [2] * len(list(LogReader(log)))


class TestFile:
    """A file that goes on where a killed process has left it."""

    def test_takes_up_after_its_last_whole_line(self, tmp_path: Path) -> None:
        """What the position file did not know yet is not written again; a torn line is."""
        log, path = tmp_path / "log", tmp_path / "e.jsonl"
        write(log)
        once(log, f"file:{path}")
        [state] = log.glob("publish-*.json")
        whole = path.read_text()
        content = json.loads(state.read_text())
        content["position"]["seq"] = 1
        state.write_text(json.dumps(content))
        once(log, f"file:{path}")
        assert path.read_text() == whole
        state.write_text(json.dumps(content))
        lines = whole.splitlines(keepends=True)
        path.write_text("".join(lines[:4]) + lines[4][:20])
        once(log, f"file:{path}")
        assert path.read_text().splitlines() == [
            *whole.splitlines()[:4],
            lines[4][:20],
            *whole.splitlines()[4:],
        ]

    def test_a_file_of_somebody_else_is_refused(self, tmp_path: Path) -> None:
        """A first run does not append to what is there."""
        write(tmp_path / "log")
        (tmp_path / "e.jsonl").write_text("kept\n")
        with pytest.raises(SinkError, match="is not empty"):
            once(tmp_path / "log", f"file:{tmp_path}/e.jsonl")

    @pytest.mark.parametrize("length", [10, 70_000, 300_000])
    @pytest.mark.parametrize("before", [0, 1, 70_000])
    def test_lines_of_any_length(self, tmp_path: Path, length: int, before: int) -> None:
        """The last line is found, however long it and the one before are."""
        path = tmp_path / "e.jsonl"
        lines = [json.dumps({"seq": 7, "x": "y" * before})] if before else []
        path.write_text("".join(f"{line}\n" for line in [*lines, json.dumps({"x": "y" * length, "seq": 8})]))
        sink = FileSink(path, FileOptions(), 8)
        assert sink.resume(3) == 8
        assert sink.resume(9) == 9
        path.write_text("torn")
        assert sink.resume(3) == 3
        path.unlink()
        assert sink.resume(3) == 3


class TestReadingFromTheMiddle:
    """A reader that begins at a batch, and the end of a log without reading it."""

    def test_from_any_batch(self, tmp_path: Path) -> None:
        """The same batches as from the beginning, without those before; closed where the writer has closed."""
        log = tmp_path / "log"
        write(log, 30, segment_bytes=2000)
        write(log, 10)
        whole = list(LogReader(log))
        for start in range(len(whole) + 3):
            reader = LogReader(log, start=start)
            assert list(reader) == whole[start:]
            assert reader.closed
            assert reader.end.kind == "clean"

    def test_head(self, tmp_path: Path) -> None:
        """It is that of the last batch, at any time, also behind a torn one."""
        log, head = tmp_path / "log", LogHead(tmp_path / "log")
        assert head.look() is None
        for epoch in range(3):
            manager = write(log, 20, segment_bytes=3000, close=False)
            last = list(LogReader(log))[-1]
            seen = head.look()
            assert seen is not None
            assert (seen.epoch, seen.seq, seen.ts, seen.closed) == (epoch, last.seq, last.ts, False)
            manager.close()
            last = list(LogReader(log))[-1]
            seen = head.look()
            assert seen is not None
            assert (seen.seq, seen.ts, seen.closed) == (last.seq, last.ts, True)
        head.close()
