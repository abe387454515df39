"""Metrics of `kvcache publish`: those that the engine itself would serve at the same batch, as far as a log tells."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.log.reader import beginnings
from kvcache.manager import KVCacheManager, Substitutes
from tests.support.feeds.publishing import Collector, Running, sinks, write
from tests.support.feeds.scraping import (
    Samples,
    a_real_prometheus,
    ask_prometheus,
    cache,
    scraped,
    serve_some,
    settled,
    sink_of,
    until_fetched,
    used_in,
    value,
)
from tests.support.logs.random_logs import LossyLog, Program
from tests.support.ports import free_port
from tests.support.seeds import seeds
from tests.support.waiting import wait_until

__all__ = ["sinks"]
pytest.importorskip("prometheus_client")

OF_THE_WRITER = {"kvcache_log_lag_batches", "kvcache_log_durable_batch", "kvcache_log_up"}
"""What stands in no log, besides `step_seconds`."""
OWN = re.compile("kvcache_(step_seconds|sink_|last_batch_age)")
"""What differs: step times, the sinks of either process, and the time of the look."""


class MeasuredProgram(Program):
    """Random commands of engines that follow each other on one log, each with metrics of its own."""

    def outputs(self) -> dict[str, Any]:
        """With times that differ."""
        clock = itertools.count(10**9, 77_000_000)
        return {
            "log": self.log,
            "substitutes": Substitutes(wall_ns=clock.__next__),
            "sinks": ["prometheus://127.0.0.1:0"],
        }

    def lose(self) -> None:
        """What is not in the log cannot be compared."""

    def served(self) -> Samples:
        """What the engine serves once all of it is in the log."""
        self.manager.flush()
        self.log.flush()
        return settled(self.manager)


def comparable(samples: Samples) -> Samples:
    """Without what differs, histograms of it included."""
    return {key: value for key, value in samples.items() if not OWN.match(key[0])}


@contextmanager
def sidecar(log: Path, *urls: str, **options: Any) -> Iterator[tuple[int, Running]]:
    """The port of a sidecar's metrics, which are those of the log's end."""
    port = free_port()
    with Running(log, f"prometheus://127.0.0.1:{port}", *urls, **options) as running:
        wait_until(lambda: _is_there(running), "no metrics")
        yield port, running


def _is_there(running: Running) -> bool:
    assert running.error is None, running.error
    metrics = running.publisher.stats().sinks[0]
    return metrics.is_open and not metrics.lag_batches


@pytest.mark.parametrize("seed", seeds([1, 2, 3, 5, 7, 9, 17], quick=3))
def test_they_are_those_of_the_engine(seed: int, tmp_path: Path) -> None:
    """Of random engines over restarts, with late and failing copies, windows, and logs without tokens: every value."""
    program = MeasuredProgram(seed, tmp_path / "log")
    try:
        program.work(250)
        own = program.served()
        with sidecar(tmp_path / "log") as (port, running):
            assert_same(own, scraped(port))
            program.restart = program.flush  # type: ignore[method-assign] # whose metrics would begin anew
            program.work(40)
            own = program.served()
            last = program.log.next_seq + program.log.batches_written - 1
            wait_until(lambda: running.publisher.stats().sinks[0].seq == last, "it does not go on")
            assert_same(own, scraped(port))
    finally:
        program.manager.close()


def assert_same(own: Samples, reported: Samples) -> None:
    """What a sidecar serves is what the engine does."""
    own, reported = comparable(own), comparable(reported)
    of_the_writer = {key for key in own if key[0] in OF_THE_WRITER}
    assert len(of_the_writer) == len(OF_THE_WRITER)
    assert own.keys() - reported.keys() == of_the_writer
    assert {key: value for key, value in own.items() if key not in of_the_writer} == reported
    assert len([name for name, _ in reported if name == "kvcache_blocks"]) == 6


def test_what_is_lost_to_the_log_is_counted(tmp_path: Path) -> None:
    """By the gap in it; gauges are right again behind it, as the whole state stands there."""
    log = tmp_path / "log"
    writer = LossyLog(log)
    with KVCacheManager(cache(), log=writer) as manager, sidecar(log) as (port, running):
        serve_some(manager, 3)
        writer.losing = True
        manager.add_sequence("running", [5] * 9)
        manager.flush()
        writer.losing = False
        manager.flush()
        writer.flush()
        last = manager.stats().batches - 1
        wait_until(lambda: running.publisher.stats().sinks[0].seq == last, "the state does not come")
        samples, stats = scraped(port), manager.stats()
    assert value(samples, "log_dropped_batches_total") == value(samples, "metrics_lost_batches_total") == 1
    assert value(samples, "requests_total") == 3
    assert value(samples, "requests_running") == stats.sequences == 1
    assert value(samples, "blocks", level="primary", state="blank") == stats.blocks_blank[0]


def test_the_sinks_are_those_of_the_sidecar(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """How far each is behind the log, which of them fails, and what was not there any more for it."""
    log = tmp_path / "log"
    write(log, 2)
    write(log, 2)
    lost, last = beginnings(log)[1].seq, [batch.seq for batch in LogReader(log)][-1]
    min(log.glob("*.kvlog")).unlink()
    sinks["a"], sinks["b"] = Collector(), Collector()
    sinks["a"].gate.clear()

    def fail() -> None:
        raise OSError(28, "made up")

    sinks["b"].fail = fail
    with sidecar(log, "x:a", "x:b", "x:c") as (port, running):
        wait_until(lambda: "c" in sinks and sinks["c"].seqs[-1:] == [last], "c is held up")
        wait_until(lambda: running.publisher.stats().sinks[2].errors > 1, "b does not fail")
        samples = scraped(port)
        sinks["a"].gate.set()

    def of_sinks(name: str) -> list[float]:
        return [
            samples[f"kvcache_sink_{name}", frozenset({"model": "m", "sink": f"x:{x}"}.items())]
            for x in "abc"
        ]

    assert of_sinks("up") == [1, 0, 1]
    assert of_sinks("lag_batches") == [last + 1 - lost, last + 1 - lost, 0]
    assert of_sinks("batches_total") == [0, 0, last + 1 - lost]
    assert of_sinks("dropped_batches_total") == [lost, lost, lost]
    assert of_sinks("errors_total")[1] > 1


@pytest.mark.needs("prometheus")
def test_a_real_prometheus_scrapes_them(tmp_path: Path) -> None:
    """All rules evaluate, and the dashboard has an answer to all that it asks of an engine, but for step times."""
    log = tmp_path / "log"
    answered = []
    with KVCacheManager(cache(), log=log, sinks=["prometheus://127.0.0.1:0"]) as manager:
        serve_some(manager)
        settled(manager)
        with sidecar(log, f"file:{tmp_path}/e.jsonl") as (port, _):
            for each in (sink_of(manager).port, port):
                directory = tmp_path / str(each)
                directory.mkdir()
                with a_real_prometheus(directory, each) as asked:
                    # Rates need two looks.
                    rate = "query?query=rate(kvcache_requests_total[5m])"
                    until_fetched(lambda asked=asked, rate=rate: (asked(rate)["result"], []))  # type: ignore[misc]
                    answered.append(ask_prometheus(asked))
    of_engine, of_sidecar = answered
    left_out = {"kvcache_step_seconds_bucket", "kvcache_log_lag_batches"}
    assert len(of_sidecar) > 15
    assert of_engine - of_sidecar == {asked for asked in of_engine if left_out & used_in(asked)}
