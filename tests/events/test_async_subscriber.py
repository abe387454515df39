"""A subscriber of asyncio at real sockets: the same reports as without, also where whoever waits is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

import events
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.subscriber import AsyncSubscriber, Subscriber
from tests.support.commands import RunPython
from tests.support.feeds.publisher import CLEARED, Publisher, batch, removed, replaying, stored
from tests.support.waiting import WAIT, wait_until


class Watched:
    """The file descriptors that the running loop watches, of those that are added from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.descriptors: set[int] = set()
        self._any = asyncio.Event()
        loop = asyncio.get_running_loop()
        add, remove = loop.add_reader, loop.remove_reader

        def noted(descriptor: int, *arguments: Any) -> None:
            self.descriptors.add(descriptor)
            self._any.set()
            add(descriptor, *arguments)

        def forgotten(descriptor: int) -> bool:
            self.descriptors.discard(descriptor)
            self._any.clear()
            return remove(descriptor)

        monkeypatch.setattr(loop, "add_reader", noted)
        monkeypatch.setattr(loop, "remove_reader", forgotten)

    async def any(self) -> None:
        """Wait until there is one."""
        async with asyncio.timeout(WAIT):
            await self._any.wait()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as publisher:
        yield publisher


def reported(seq: int) -> bytes:
    return batch(stored(seq + 1, parent=seq or None), ts=float(seq))


MAPS = [batch(stored(1, 2)), batch(removed(2), stored(3, parent=1)), batch(CLEARED)]
ARRAYS = [
    batch(["BlockStored", [1], None, [1, 2], 2, None, "GPU", None]),
    batch(["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]),
]
SGLANG = [
    batch(
        {
            "type": "BlockStored",
            "block_hashes": [-7],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_id": None,
            "medium": "CPU_PINNED",
            "cache_salt": "s",
        },
        rank=None,
    )
]


def is_last(report: Report, seq: int) -> bool:
    return isinstance(report, Received) and report.seq == seq and not report.replayed


async def listen(subscriber: AsyncSubscriber, last: int) -> list[Report]:
    """All reports up to a live batch."""
    reports: list[Report] = []
    async with asyncio.timeout(WAIT):
        async for report in subscriber:
            reports.append(report)
            if is_last(report, last):
                break
    return reports


@pytest.mark.parametrize("replay", [False, True])
def test_the_same_reports_as_without_asyncio(publisher: Publisher, replay: bool) -> None:
    """On one stream of all forms, with a gap, a batch that cannot be read and a restart, both report the same."""
    stream = [(3, MAPS[0]), (4, MAPS[1]), (7, ARRAYS[0]), (8, ARRAYS[1]), (9, b"\xc1"), (10, SGLANG[0])]
    stream += [(0, batch(CLEARED, ts=99.0)), (1, batch(ts=99.5)), (2, batch(stored(4), ts=100.0))]

    async def both(plain: Subscriber, options: dict[str, Any]) -> tuple[list[Report], list[Report]]:
        async with AsyncSubscriber(publisher.endpoint, **options) as subscriber:
            await asyncio.to_thread(publisher.wait_subscribed)
            for seq, payload in stream:
                publisher.send(seq, payload, b"kv@me")
            found = await listen(subscriber, 2)
        expected: list[Report] = []
        for report in plain:
            expected.append(report)
            if is_last(report, 2):
                break
        return found, expected

    with replaying({5: reported(5)}) as server:
        options = {"replay": server.endpoint} if replay else {}
        with Subscriber(publisher.endpoint, **options) as plain:  # type: ignore[arg-type]
            publisher.wait_subscribed()
            found, expected = asyncio.run(both(plain, options))
    assert found == expected
    kinds = [type(report) for report in found]
    assert kinds.count(Restarted) == 1
    assert Missed(9, 9, False, "the message is not a batch of KV events") in found
    lost = [Missed(5, 5, recovered=True), Missed(6, 6, recovered=False)] if replay else [Missed(5, 6, False)]
    assert [report for report in found if isinstance(report, Missed) and report.first < 9] == lost
    assert [report.seq for report in found if isinstance(report, Received)][-3:] == [0, 1, 2]


def test_nothing_is_lost_to_whoever_is_cancelled(publisher: Publisher) -> None:
    """Waits that are cancelled all the time, in both ways of waiting, give each batch once and in order."""

    async def main() -> list[int]:
        seen: list[int] = []
        tries = cancelled = 0
        async with AsyncSubscriber(publisher.endpoint) as subscriber:
            await asyncio.to_thread(publisher.wait_subscribed)

            async def send() -> None:
                for seq in range(300):
                    publisher.send(seq, reported(seq))
                    await asyncio.sleep(0.001)

            sending = asyncio.create_task(send())
            while not seen or seen[-1] < 299:
                tries += 1
                seconds = 0.0007 * (tries % 3)
                try:
                    async with asyncio.timeout(seconds):
                        if tries % 2:
                            reports = [await anext(subscriber)]
                        else:
                            reports = await subscriber.poll()
                except TimeoutError:
                    cancelled += 1
                    continue
                seen += [report.seq for report in reports if isinstance(report, Received)]
            await sending
        assert cancelled > 20
        return seen

    assert asyncio.run(main()) == list(range(300))


def test_a_cancelled_wait_takes_nothing_from_the_next_one(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a wait that was cancelled the next one hears of what comes."""

    async def main() -> list[Report]:
        watched = Watched(monkeypatch)
        async with AsyncSubscriber(publisher.endpoint) as subscriber, asyncio.timeout(WAIT):
            await asyncio.to_thread(publisher.wait_subscribed)
            for _ in range(20):
                waiting = asyncio.create_task(subscriber.poll())
                await watched.any()
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting
            waiting = asyncio.create_task(subscriber.poll())
            await watched.any()
            publisher.send(0, reported(0))
            return await waiting

    [report] = asyncio.run(main())
    assert isinstance(report, Received)


def test_several_in_one_loop(publisher: Publisher) -> None:
    """Subscribers of several publishers, and other tasks, run beside each other."""

    async def main(others: list[Publisher]) -> list[int]:
        async with asyncio.timeout(WAIT):
            subscribers = [AsyncSubscriber(each.endpoint) for each in others]
            waiting = [asyncio.create_task(listen(each, 9)) for each in subscribers]
            for each in others:
                await asyncio.to_thread(each.wait_subscribed)
            for seq in range(10):
                for each in others:
                    each.send(seq, reported(seq))
            counts = [len(reports) for reports in await asyncio.gather(*waiting)]
            for subscriber in subscribers:
                subscriber.close()
            return counts

    with Publisher() as second, Publisher() as third:
        assert asyncio.run(main([publisher, second, third])) == [10, 10, 10]


def test_a_flood_lets_other_tasks_run(publisher: Publisher) -> None:
    """While there is always something to read, other tasks have a turn at each poll."""
    total = 5000

    async def main() -> tuple[int, int]:
        turns = polls = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with AsyncSubscriber(publisher.endpoint) as subscriber, asyncio.timeout(WAIT):
            await asyncio.to_thread(publisher.wait_subscribed)
            for seq in range(total):
                publisher.send(seq, batch(ts=float(seq)))
            counting, reports = asyncio.create_task(count()), list[Report]()
            while not any(is_last(report, total - 1) for report in reports):
                polls, reports = polls + 1, await subscriber.poll()
            counting.cancel()
        return turns, polls

    turns, polls = asyncio.run(main())
    assert turns >= polls > 1


def test_closing_ends_a_wait(publisher: Publisher) -> None:
    """Another task that closes it ends an iteration that waits, and one that begins afterwards."""

    async def main() -> tuple[list[Report], list[Report]]:
        subscriber = AsyncSubscriber(publisher.endpoint)
        asyncio.get_running_loop().call_later(0.1, subscriber.close)
        async with asyncio.timeout(WAIT):
            waited = [report async for report in subscriber]
            subscriber.close()
            return waited, await subscriber.poll()

    assert asyncio.run(main()) == ([], [])


def test_timeout(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing comes, `poll` returns nothing after its time."""

    async def main() -> float:
        watched = Watched(monkeypatch)
        async with AsyncSubscriber(publisher.endpoint) as subscriber:
            begun = time.monotonic()
            waiting = asyncio.create_task(subscriber.poll(50))
            await watched.any()
            assert await waiting == []
            # Nothing is watched any more: the descriptors' numbers may soon be others'.
            assert not watched.descriptors
            return time.monotonic() - begun

    assert asyncio.run(main()) >= 0.05


COUNT = 301
"""Messages of which several are read at once."""


def test_an_iteration_that_is_left_goes_on(publisher: Publisher) -> None:
    """Who leaves a loop in the middle of what was read at once and comes again misses nothing, with and without."""

    async def main() -> list[Report]:
        found: list[Report] = []
        async with AsyncSubscriber(publisher.endpoint) as subscriber, asyncio.timeout(WAIT):
            await asyncio.to_thread(publisher.wait_subscribed)
            for seq in range(COUNT):
                publisher.send(seq, reported(seq))
            while len(found) < COUNT:
                async for report in subscriber:
                    found.append(report)
                    if len(found) % 2:
                        break
        return found

    def seqs(reports: list[Report]) -> list[int]:
        return [report.seq for report in reports if isinstance(report, Received)]

    assert seqs(asyncio.run(main())) == list(range(COUNT))
    with Publisher() as other, Subscriber(other.endpoint) as subscriber:
        other.wait_subscribed()
        for seq in range(COUNT):
            other.send(seq, reported(seq))
        found: list[Report] = []
        while len(found) < COUNT:
            found += [*islice(subscriber, 3), *subscriber.poll(20)]
        assert seqs(found) == list(range(COUNT))


def test_whether_the_publisher_is_there(publisher: Publisher) -> None:
    """`connected` follows a publisher that comes, goes and comes back."""
    with Subscriber(publisher.endpoint) as subscriber:

        def wait_connected(expected: bool) -> None:
            wait_until(lambda: subscriber.connected is expected, meanwhile=lambda: subscriber.poll(20))

        assert not subscriber.connected
        wait_connected(True)
        publisher.close()
        wait_connected(False)
        with Publisher(publisher.endpoint):
            wait_connected(True)


def test_exported_where_events_are(run_python: RunPython) -> None:
    """`events` has the readers, and loads ZeroMQ and asyncio for nobody who does not ask for them."""
    assert events.Subscriber is Subscriber
    assert events.AsyncSubscriber is AsyncSubscriber
    assert {"Subscriber", "AsyncSubscriber", "FanInSubscriber", "Index", "Missed"} <= set(dir(events))
    done = run_python(
        "import sys, events\n"
        "print([name for name in ('zmq', 'asyncio') if name in sys.modules])\n"
        "from events import AsyncSubscriber, Subscriber\n"
        "print('zmq' in sys.modules, hasattr(events, 'Subscribers'))"
    )
    assert (done.stdout, done.stderr) == ("[]\nTrue False\n", "")
