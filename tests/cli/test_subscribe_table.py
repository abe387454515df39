"""The table of `kvcache subscribe`, with real publishers of which some fall silent, die, lose batches or come back."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from events.formats.vllm import decode_batch
from events.subscribe.continuity import Missed, Received, Report, Restarted, Restated
from events.subscribe.fan_in import Worker
from kvcache.cli.output import Output
from kvcache.cli.subscribe.sources import EndpointArgument, Sender
from kvcache.cli.subscribe.workers import Held, Prompt, WorkerRow, Workers
from kvcache.errors import UsageError
from tests.support.answers import keys_of
from tests.support.commands import Kvcache, Start
from tests.support.feeds.publisher import CLEARED, Publisher, batch, removed, replaying, stored
from tests.support.feeds.workers import connecting
from tests.support.forked import Forked
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.waiting import WAIT

Seen = Callable[[Callable[[list[dict[str, Any]]], bool]], list[dict[str, Any]]]


class Table:
    """The command as a process, and what its JSON said last."""

    def __init__(self, start: Start, *args: object) -> None:
        self.process = start("subscribe", *args, "--table", "--json", "--every", "0.05")
        self.last: dict[str, Any] = {"workers": []}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.last = json.loads(line)
                self._changed.notify_all()

    def until(self, *conditions: Callable[..., bool]) -> list[dict[str, Any]]:
        """The workers as soon as each meets its condition."""

        def met() -> bool:
            workers = self.last["workers"]
            return len(workers) == len(conditions) and all(
                condition(worker) for condition, worker in zip(conditions, workers, strict=True)
            )

        with self._changed:
            assert self._changed.wait_for(met, WAIT), self.last
            return list(self.last["workers"])

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self._thread.join(WAIT)
        return self.process.wait(WAIT)

    def kill(self) -> None:
        self.process.kill()
        self._thread.join(WAIT)


OpenTable = Callable[..., Table]


@pytest.fixture
def open_table(start: Start) -> Iterator[OpenTable]:
    """Start the command with arguments."""
    with ExitStack() as stack:

        def begin(*args: object) -> Table:
            table = Table(start, *args)
            stack.callback(table.kill)
            return table

        yield begin


def said(**facts: object) -> Callable[[dict[str, Any]], bool]:
    """Whether a worker is said to be so."""
    return lambda worker: {key: worker[key] for key in facts} == facts


def now(*events: Any, rank: int | None = 0) -> bytes:
    return batch(*events, ts=time.time(), rank=rank)


@pytest.fixture
def three() -> Iterator[list[Publisher]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Publisher()) for _ in range(3)]


def options(endpoint: str, replay: str) -> str:
    return f"{endpoint}?replay={replay.rpartition(':')[2]}"


class TestProcess:
    """The whole command."""

    def test_three_workers_of_which_one_dies_one_restarts_and_all_lose_batches(
        self, open_table: OpenTable, three: list[Publisher]
    ) -> None:
        """A death, a restart, and gaps with and without a replay: each is in the row of the worker that had it."""
        with replaying({1: now(stored(1)), 2: now(stored(2, parent=1))}) as server:
            table = open_table(options(three[0].endpoint, server.endpoint), *(p.endpoint for p in three[1:]))
            for publisher in three:
                publisher.wait_subscribed()
            table.until(said(seq=2), said(state="connected"), said(state="connected"))
            for number, publisher in enumerate(three):
                publisher.send(3, now(stored(10), stored(11, medium="CPU"), rank=number), b"kv@%d" % number)
            table.until(*(said(seq=3, state="live") for _ in three))
            server.batches = {4: now(stored(20)), 5: now()}
            for number, publisher in enumerate(three):
                publisher.send(6, now(removed(10), rank=number))
            workers = table.until(*(said(seq=6) for _ in three))
            gaps = [(worker["missed_batches"], worker["recovered_batches"]) for worker in workers]
            assert gaps == [(1, 2), (2, 0), (2, 0)]  # the first was asked for all, and knew no batch 0
            assert [worker["blocks"]["gpu"] for worker in workers] == [3, 0, 0]
            assert [worker["blocks"]["host"] for worker in workers] == [1, 1, 1]
            assert all(0 <= worker["lag_seconds"] < WAIT for worker in workers)
            three[1].close()
            table.until(said(state="live"), said(state="gone", seq=6), said(state="live"))
            three[2].close()
            with Publisher(three[2].endpoint) as again:
                again.wait_subscribed()
                again.send(0, now(CLEARED, stored(30), rank=2))
                workers = table.until(
                    said(state="live", restarts=0),
                    said(state="gone", restarts=0),
                    said(state="live", restarts=1, seq=0),
                )
                assert workers[2]["blocks"] == {"gpu": 1, "host": 0, "storage": 0}
                assert [worker["rank"] for worker in workers] == [0, 1, 2]
                assert table.end() == 128 + signal.SIGINT

    def test_prompt(self, open_table: OpenTable, three: list[Publisher], tmp_path: Path) -> None:
        """--prompt finds who holds the longest prefix, at which levels, and follows when that changes."""
        prompt = tmp_path / "prompt.json"
        prompt.write_text(json.dumps([1, 2, 2, 3, 3, 4, 7]))
        table = open_table(*(publisher.endpoint for publisher in three), "--prompt", prompt)
        for publisher in three:
            publisher.wait_subscribed()
        three[0].send(0, now(stored(1)))
        three[1].send(0, now(stored(1, 2), stored(3, parent=2, medium="CPU")))
        three[2].send(0, now(stored(2, 3)))  # which begins otherwise
        tokens = [{"gpu": 2, "host": 0}, {"gpu": 4, "host": 2}, {"gpu": 0, "host": 0}]
        table.until(
            *(
                said(prefix_tokens={**held, "storage": 0}, longest=number == 1)
                for number, held in enumerate(tokens)
            )
        )
        assert table.last["prompt_tokens"] == 7
        three[1].send(1, now(removed(1)))
        table.until(
            said(longest=True),
            said(longest=False, prefix_tokens={"gpu": 0, "host": 0, "storage": 0}),
            said(longest=False),
        )

    def test_workers_that_connect(self, open_table: OpenTable) -> None:
        """Where many connect each has its row as soon as it is heard, and heartbeats are told."""
        port = free_port()
        table = open_table(f"tcp://127.0.0.1:{port}", "--bind")
        with (
            connecting(port, "topic=kv@a@unknown") as one,
            connecting(port, "topic=kv@b@unknown&rank=3") as two,
        ):
            for worker in (one, two):
                worker.put(worker.source.store(1, 2))
            beating = (lambda each: each["heartbeat_seconds"] is not None and each["blocks"]["gpu"] == 2,) * 2
            workers = table.until(*beating)
        ranks = {worker["topic"]: worker["rank"] for worker in workers}
        assert ranks == {"kv@a@unknown": 0, "kv@b@unknown": 3}
        assert {worker["state"] for worker in workers} == {"live"}

    def test_a_worker_that_falls_silent(self, open_table: OpenTable) -> None:
        """Who has sent heartbeats, is connected still and sends none any more is said to be silent."""
        with Publisher() as publisher:
            table = open_table(publisher.endpoint)
            publisher.wait_subscribed()
            for seq in range(3):
                publisher.send(seq, now(*[stored(1)] * (seq == 0)))
            [worker] = table.until(said(state="live", seq=2))
            age = worker["heard_seconds"]
            [worker] = table.until(said(state="silent"))
            assert worker["heard_seconds"] == worker["heartbeat_seconds"] > max(age, 5)
            assert worker["lag_seconds"] < 5
            publisher.send(3, now())
            table.until(said(state="live", seq=3))

    def test_plain_lines(self, start: Start, three: list[Publisher]) -> None:
        """In a pipe each report is a time and an aligned table, the last one at the end."""
        process = start("subscribe", *(each.endpoint for each in three), "--count", 3, "-q")
        for publisher in three:
            publisher.wait_subscribed()
        for publisher in three:
            publisher.send(0, now(stored(1, 2)), b"kv@pod")
        out, err = process.communicate(timeout=WAIT)
        lines = out.splitlines()
        assert (process.returncode, err) == (0, "")
        assert re.fullmatch(r"20\d\d-.*Z  3 workers", lines[0])
        assert lines[1].split()[:5] == ["worker", "topic", "rank", "GPU", "host"]
        assert [line.split()[:5] for line in lines[2:]] == [
            [each.endpoint.removeprefix("tcp://"), "kv@pod", "0", "2", "0"] for each in three
        ]

    @pytest.mark.parametrize("columns", [80, 120])
    def test_on_a_terminal(self, three: list[Publisher], columns: int) -> None:
        """On a terminal the table is drawn in place, in its width."""
        arguments = ["subscribe", *(each.endpoint for each in three), "--count", "3"]
        master, slave = pty.openpty()
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
        process = Forked("kvcache", *arguments, stdout=slave, stderr=slave, env=settings)
        os.close(slave)
        for publisher in three:
            publisher.wait_subscribed()
            publisher.send(0, now(stored(1, 2)), b"kv@pod")
        shown = b""
        try:
            while data := os.read(master, 65536):
                shown += data
        except OSError:
            pass
        os.close(master)
        assert process.wait(WAIT) == 0
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "").splitlines()
        last = lines[-4:]
        assert last[0].split()[0] == "worker"
        assert [line.split()[0] for line in last[1:]] == [
            each.endpoint.removeprefix("tcp://") for each in three
        ]
        assert max(map(len, last)) <= columns


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def received(
    seq: int, *happened: Any, ts: float = 0.0, rank: int | None = 0, replayed: bool = False
) -> Received:
    return Received(seq, "kv@pod@m", decode_batch(batch(*happened, ts=ts, rank=rank)), replayed)


ONE = Sender("tcp://10.0.0.1:5557")


def workers_of(*reports: Report, prompt: Prompt | None = None, clock: Clock | None = None) -> Workers:
    workers = Workers(prompt, clock=clock or Clock(), wall=lambda: 500.0)
    workers.expect([ONE])
    for report in reports:
        workers.fold(ONE, report)
    workers.look()
    return workers


class TestWorkers:
    """What is known of them."""

    def test_lag_is_of_the_last_live_batch(self) -> None:
        """It is the time from a batch's own to its arrival; of replayed batches, and of no time, it says nothing."""
        lags = []
        for report in [
            received(0, ts=1.0, replayed=True),
            received(1, ts=499.75),
            received(2, ts=100.0, replayed=True),
            received(3, ts=501.0),
            received(4, ts=1e300),
        ]:
            [row] = (
                workers_of(received(1, ts=499.75), report).rows()
                if report.seq == 2
                else workers_of(report).rows()
            )
            lags.append(row.lag)
        assert lags == [None, 0.25, 0.25, -1.0, None]

    def test_events_per_second_are_those_of_the_last_seconds(self) -> None:
        """What is older does not count; shortly after the start the time since then does."""
        clock = Clock()
        workers = workers_of(clock=clock)
        [row] = workers.rows()
        clock.now += 2
        workers.fold(ONE, received(0, *[CLEARED] * 10))
        assert row.rate.per_second(clock.now) == 5
        clock.now += 3
        assert row.rate.per_second(clock.now) == 2
        clock.now += 2
        assert row.rate.per_second(clock.now) == 0

    def test_a_rank_has_a_row_of_its_own(self) -> None:
        """One publisher may speak for several caches; what was missed may concern each of them."""
        workers = workers_of(
            Missed(0, 1, recovered=False),
            received(2, stored(1), rank=4),
            received(3, stored(1, 2), rank=5),
            Missed(4, 4, recovered=True),
            Restarted(4, 0),
            received(0, stored(7), rank=5),
        )
        facts = [
            (
                row.rank,
                row.index.count(0),
                row.index.missed_batches,
                row.index.recovered_batches,
                row.index.restarts,
            )
            for row in workers.rows()
        ]
        assert facts == [(4, 0, 2, 1, 1), (5, 1, 0, 1, 1)]

    @pytest.mark.parametrize(
        ("pauses", "silent_after"), [([1.0, 1.0], 5.0), ([4.0, 1.0], 12.0), ([0.1, 0.1, 30.0], 90.0)]
    )
    def test_silence_is_more_than_three_pauses(self, pauses: list[float], silent_after: float) -> None:
        """Heartbeats may be rare: who pauses long is called silent later."""
        clock = Clock()
        workers = workers_of(received(0), clock=clock)
        [row] = workers.rows()
        for seq, pause in enumerate(pauses, 1):
            clock.now += pause
            workers.fold(ONE, received(seq))
        assert row.state(True, clock.now + silent_after) == "live"
        assert row.state(True, clock.now + silent_after + 0.01) == "silent"
        assert row.state(False, clock.now) == "gone"

    def test_who_sends_no_heartbeats_is_never_silent(self) -> None:
        """An idle publisher without heartbeats is as live as one can know."""
        [row] = workers_of(received(0, stored(1))).rows()
        assert row.state(True, 1e9) == row.state(None, 1e9) == "live"
        [row] = workers_of().rows()
        assert (row.state(False, 0), row.state(True, 0)) == ("waiting", "connected")

    def test_ties(self) -> None:
        """Of those that hold equally much, who holds more of it on the GPU is ahead; equals are all named."""
        others = [Sender(f"tcp://10.0.0.{number}:1") for number in (2, 3)]
        workers = Workers(Prompt((1, 2, 2, 3)))
        for sender, medium in ((ONE, "CPU"), (others[0], "GPU"), (others[1], "GPU")):
            workers.fold(sender, received(0, stored(1, 2, medium=medium)))
        workers.look()
        assert [row.sender for row in workers.longest()] == others


def held_of(prompt: Prompt, *happened: Any) -> Held:
    workers = workers_of(received(0, *happened), prompt=prompt)
    return workers.held(workers.rows()[0])


class TestHolders:
    """How much of a prompt is where."""

    PROMPT = Prompt((1, 2, 2, 3, 3, 4, 4))

    @pytest.mark.parametrize(
        ("happened", "held"),
        [
            ([stored(1, 2, 3)], (6, 0, 0)),
            ([stored(1, 2, 3, 4)], (6, 0, 0)),
            ([stored(1, 2, 3), removed(2)], (2, 0, 0)),
            ([stored(1, 2, 3), stored(2, parent=1, medium="CPU"), removed(2)], (2, 4, 0)),
            ([stored(1, 2, 3), stored(2, parent=1, medium="CPU")], (6, 0, 0)),
            ([stored(1), stored(2, parent=1, medium="DISK")], (2, 0, 2)),
            ([stored(2, 3)], (0, 0, 0)),
            ([stored(1, 3)], (2, 0, 0)),
            ([stored(1, 2, 3), CLEARED], (0, 0, 0)),
            ([stored(1), stored(1, 2, group=1)], (2, 0, 0)),
            ([stored(1, 2, lora_name="a")], (0, 0, 0)),
            ([stored(1, 2, cache_salt="s")], (0, 0, 0)),
            ([stored(1, 2, extra_keys=[["s"], None])], (0, 0, 0)),
            ([stored(1, 2, extra_keys=[None, [["digest", 1]]])], (2, 0, 0)),
            ([], (0, 0, 0)),
        ],
    )
    def test_plain(self, happened: list[Any], held: tuple[int, int, int]) -> None:
        """The prefix on the GPU, and what is longer with the other levels; others' adapters and salts do not count."""
        assert held_of(self.PROMPT, *happened) == held

    @pytest.mark.parametrize(
        ("more", "held"),
        [
            ({"lora_name": "a", "extra_keys": [["a", "s"], ["a"]]}, 4),
            ({"lora_name": "a", "cache_salt": "s"}, 4),
            ({"lora_name": "a", "extra_keys": [["a", hashlib.sha256(b"s").hexdigest()], ["a"]]}, 4),
            ({"lora_name": "a", "extra_keys": [["a"], ["a"]]}, 0),
            ({"lora_name": "b", "cache_salt": "s"}, 0),
            ({"extra_keys": [["s"], None]}, 0),
            ({"lora_name": "a", "extra_keys": [["a", "s"], ["a", ["digest", 0]]]}, 2),
            ({}, 0),
        ],
    )
    def test_namespace(self, more: dict[str, Any], held: int) -> None:
        """A prompt of an adapter and with a salt finds blocks of both alone, the salt as it is or by its digest."""
        prompt = Prompt(self.PROMPT.tokens, "a", "s")
        assert held_of(prompt, stored(1, 2, **more)) == (held, 0, 0)

    def test_it_follows(self) -> None:
        """What changes is followed, and a restart takes everything."""
        workers = workers_of(prompt=self.PROMPT)
        found = []
        reports: list[Report] = [
            received(0, stored(1)),
            received(1, stored(2, parent=1), rank=1),
            received(2, stored(2, parent=1)),
            received(3),
            Restarted(3, 0),
            received(0, stored(1, 2, 3)),
        ]
        for report in reports:
            workers.fold(ONE, report)
            workers.look()
            found.append(workers.held(workers.rows()[0])[0])
        assert found == [2, 2, 4, 4, 0, 6]


class TestView:
    """The table in the room that there is."""

    def full(self) -> Workers:
        workers = Workers(
            Prompt(tuple(range(1, 101))),
            connected=lambda sender: "nobody" not in sender.endpoint,
            clock=(clock := Clock()),
            wall=lambda: 500.0,
        )
        for number in range(3):
            where = f"tcp://kv-worker-{number}.engines.svc.cluster.local:5557"
            workers.fold(Sender(where), received(0, *[stored(n) for n in range(1, 2000)], ts=499.0 - number))
            workers.fold(
                Sender(where), received(1, stored(9, medium="CPU"), stored(8, medium="DISK"), rank=0)
            )
            workers.fold(Sender(where), Missed(2, 1234, recovered=False))
            workers.fold(Sender(where), received(1235, ts=0.25))
        worker = Worker("kv@10.0.0.1:8000@organization/model", "KEY12345")
        workers.fold(Sender("tcp://*:5557", worker), received(0, rank=7))
        workers.expect([Sender("tcp://nobody:1")])
        clock.now += 3
        return workers

    @pytest.mark.parametrize("width", [80, 120, 200])
    def test_it_fits(self, width: int) -> None:
        """Drawn by rich no line is longer than the terminal, and no cell is cut: long names take several lines."""
        workers, out = self.full(), Output()
        console = Console(file=(text := StringIO()), width=width)
        console.print(*out.frame(lambda: workers.show(out)), sep="\n")
        shown = text.getvalue()
        assert max(map(len, shown.splitlines())) <= width
        reported = "".join(shown.split())
        for row in workers.rows():
            for letters in re.findall("[a-z]+", row.name.partition(".")[0]):
                assert letters[:3] in reported
        if width == 200:
            for row in workers.rows():
                assert row.name in shown
            heads = ("storage", "ev/s", "lost", "recovered", "restarts", "prefix")
            assert all(head in shown for head in heads)

    @pytest.mark.parametrize(
        ("reports", "lost"),
        [
            ([received(0, stored(1))], "0"),
            ([received(7, stored(1))], "?"),
            ([received(7, CLEARED, stored(1))], "0"),
            ([received(7), received(8, CLEARED, stored(1))], "0"),
            ([received(7), received(8, stored(1), rank=1)], "?"),
            ([received(0), Missed(1, 2, recovered=False), received(3)], "2"),
            ([received(0), Missed(1, 2, recovered=True), received(3)], "0"),
            ([received(7), Restarted(7, 0), received(0)], "0"),
            ([received(7, CLEARED), Restarted(7, 2), received(2)], "?"),
        ],
    )
    def test_a_worker_of_which_a_part_is_known_is_marked(self, reports: list[Report], lost: str) -> None:
        """By what was lost, and above, from when it is first heard in the middle until it tells its whole state."""
        workers = Workers(clock=Clock(), wall=lambda: 500.0)
        for report in reports:
            workers.fold(Sender("tcp://a:1"), report)
        said, cells, styles = shown_of(workers)
        assert cells[-1]["lost"] == lost
        assert any("are known in part" in line for line in said) == (lost != "0")
        assert (styles[-1] == "yellow") == (lost != "0")

    def test_a_state_reported_anew_has_a_column(self) -> None:
        """Beside restarts, which it is none of."""
        workers = Workers(clock=Clock(), wall=lambda: 500.0)
        sender = Sender("tcp://a:1")
        workers.fold(sender, received(3, CLEARED, stored(1)))
        workers.fold(sender, Restated(4, 4095))
        workers.fold(sender, received(4096, CLEARED, stored(1)))
        _, [cells], _ = shown_of(workers)
        assert (cells["resyncs"], cells["restarts"]) == ("1", "0")

    def test_more_ranks_than_are_shown_are_counted(self) -> None:
        """Rows are a hundred at most; what claims to be of a rank that nobody has takes no memory."""
        workers = Workers(clock=Clock(), wall=lambda: 500.0)
        for rank in [*range(3000), -1]:
            workers.fold(Sender("tcp://a:1"), received(0, rank=rank))
        said, cells, styles = shown_of(workers)
        assert (len(cells), len(styles)) == (100, 100)
        assert said[0].endswith("  1,024 workers")
        more = "showing 100 of 1,024 workers; --json prints all"
        assert said[1:] == [more, "1,977 batches of ranks above 1,023 ignored"]

    def test_what_it_says(self) -> None:
        """Each cell; nothing that a publisher calls itself drives the terminal."""
        workers = Workers(clock=(clock := Clock()), wall=lambda: 500.0)
        sender = Sender("tcp://*:5557", Worker("kv@\x1b[2J"))
        workers.fold(sender, received(0, stored(1, 2), ts=497.5))
        workers.fold(sender, Missed(1, 2, recovered=True))
        workers.fold(sender, received(3, ts=497.5))
        clock.now += 1
        _, [cells], _ = shown_of(workers)
        assert cells == {
            "worker": "kv@\\x1b[2J",
            "rank": "0",
            "GPU": "2",
            "host": "0",
            "ev/s": "1",
            "lag": "2.5 s",
            "lost": "0",
            "recovered": "2",
            "restarts": "0",
            "seen": "1.0 s",
        }

    def test_who_holds_most_is_said(self) -> None:
        """Who holds the longest prefix is said above; or that nobody holds any."""
        prompt = Prompt((1, 2, 2, 3))
        said, _, _ = shown_of(workers_of(received(0, stored(1, 2)), prompt=prompt))
        held = "longest prefix: 4 of 4 tokens (4+0+0 on GPU+host+storage) at 10.0.0.1:5557 rank 0"
        assert said[1:] == [held]
        said, _, _ = shown_of(workers_of(prompt=prompt))
        assert said[1:] == ["longest prefix: no worker has a block of the prompt (4 tokens)"]


def shown_of(workers: Workers) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """What is printed of them: lines, the cells of each row by column, and how rows are drawn."""
    out = Mock()
    workers.show(out)
    [table] = out.table.call_args_list
    [rows] = table.args
    said = [call.args[0] for call in (*out.heading.call_args_list, *out.line.call_args_list)]
    cells = [
        {name: cell if isinstance(cell, str) else f"{cell:,}" for name, cell in row.items()} for row in rows
    ]
    return said, cells, table.kwargs["styles"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tcp://h:5557", ("tcp://h:5557", None, None)),
        ("tcp://h:5557?replay=5558", ("tcp://h:5557", "tcp://h:5558", None)),
        ("tcp://[::1]:5557?replay=5558", ("tcp://[::1]:5557", "tcp://[::1]:5558", None)),
        ("tcp://h:1?replay=other:2", ("tcp://h:1", "tcp://other:2", None)),
        ("ipc:///a?replay=ipc:///b", ("ipc:///a", "ipc:///b", None)),
        ("tcp://*:1?replay=topic", ("tcp://*:1", "topic", None)),
        ("tcp://h:1?curve_server=d/w.key", ("tcp://h:1", None, Path("d/w.key"))),
    ],
)
def test_places(text: str, place: tuple[object, ...]) -> None:
    """What may stand behind an endpoint."""
    assert EndpointArgument.read(text) == place


@pytest.mark.parametrize("text", ["tcp://h:1?reply=2", "tcp://h:1?replay="])
def test_unknown_options_of_an_endpoint(text: str) -> None:
    """A misspelled or empty one is refused, with those that there are."""
    with pytest.raises(UsageError, match="replay=PORT and curve_server=FILE"):
        EndpointArgument.read(text)


HERE, THERE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([HERE, THERE, "--replay", HERE], "ENDPOINT?replay=PORT"),
        ([f"{HERE}?replay=3", "--replay", HERE], "given twice"),
        ([HERE, HERE], "is given twice"),
        ([HERE, "--every", "1"], "--every requires --table"),
        ([HERE, "--table", "--lora-name", "a"], "require --prompt"),
        ([HERE, "--prompt", "missing.json"], "missing.json"),
        ([HERE, THERE, "tcp://127.0.0.1:99999"], "its port must be from"),
    ],
)
def test_what_is_refused(kvcache: Kvcache, arguments: list[str], reason: str) -> None:
    """What cannot be meant is one line, and exits with 2."""
    done = kvcache("subscribe", *arguments, "-q")
    assert (done.code, done.out) == (2, "")
    assert reason in done.err


def test_a_prompt_that_is_none_is_not_quoted(kvcache: Kvcache, tmp_path: Path) -> None:
    """Token ids stay out of messages."""
    (tmp_path / "prompt").write_text("123456789 x")
    done = kvcache("subscribe", HERE, "--prompt", tmp_path / "prompt", "-q")
    assert (done.code, "does not contain token ids" in done.err, "123456789" in done.err) == (2, True, False)


def test_every_key_is_documented(start: Start) -> None:
    """The page has each key of a report, and no other ones on top."""
    with Publisher() as publisher:
        process = start("subscribe", publisher.endpoint, "--table", "--json", "--count", 1)
        publisher.wait_subscribed()
        publisher.send(0, now(stored(1)))
        out, _ = process.communicate(timeout=WAIT)
    report = json.loads(out.splitlines()[-1])
    found = set(keys_of(report)) | {f"workers.prefix_tokens.{level}" for level in ("gpu", "host", "storage")}
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    section = page.partition("\n### The table of workers\n")[2].partition("\n## ")[0]
    rows = "\n".join(line for line in section.splitlines() if line.startswith("| `"))
    assert found == set(re.findall("`([a-z_.]+)`", rows)) - {"null"}


def test_rows_know_their_topic() -> None:
    """A replay without topics takes none away."""
    row = WorkerRow(ONE, 0, 0.0)
    row.take(received(0), 0.0, 0.0)
    row.take(Received(1, "", decode_batch(batch()), True), 0.0, 0.0)
    assert row.topic == "kv@pod@m"
