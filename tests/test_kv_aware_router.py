"""The example of a load balancer: its parts by themselves, and all of it with real processes and sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from events.formats.vllm import decode_batch
from events.subscribe.continuity import Received
from examples.kv_aware_router.__main__ import main
from examples.kv_aware_router.balancer import Balancer, Refused, Served
from examples.kv_aware_router.clock import StepCosts, TraceTime, WorkerClock
from examples.kv_aware_router.feed import Feed
from examples.kv_aware_router.fleet import Fleet, Place, Sizes
from examples.kv_aware_router.inbox import Inbox
from examples.kv_aware_router.index import FleetIndex
from examples.kv_aware_router.member import REQUEST_TOKENS, Member
from examples.kv_aware_router.page import page
from examples.kv_aware_router.policies import KVAware, RoundRobin
from examples.kv_aware_router.rounds import Round, Setting
from examples.kv_aware_router.service import Service
from examples.kv_aware_router.serving import JobProgress, Serving
from examples.kv_aware_router.table import gain, table
from examples.kv_aware_router.tally import Tally
from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.prefixes.publisher import WorkerRank
from kvcache.workload.chats import generate_chats
from kvcache.workload.driver import ObservedStep
from kvcache.workload.waiting_queue import Waiting
from tests.support.feeds.publisher import batch, stored
from tests.support.needs import program
from tests.support.servers.browser import Browser
from tests.support.waiting import wait_until

BLOCK = 16


def member(name: str, *, load: int = 0, running: int = 0, cached: int = 0) -> Member:
    made = Member(name, Place(f"http://{name}", name), running=running, stats={"cached_blocks": cached})
    made.to_compute[0] = load
    return made


class TestPolicies:
    """Which worker a request goes to."""

    def test_overlap_minus_load(self) -> None:
        """A prefix is worth so much waiting as computing it would take, and no more; the weight says how much."""
        near, far = member("near", load=900), member("far")
        assert KVAware().choose([near, far], {"near": 1000}) is near
        near.to_compute[1] = 200
        assert KVAware().choose([near, far], {"near": 1000}) is far
        assert KVAware(load_weight=0.5).choose([near, far], {"near": 1000}) is near

    def test_running_requests_weigh_a_little(self) -> None:
        """Of workers that know nothing of a prompt, the one with fewer requests is taken, then the emptier one."""
        busy, idle = member("busy", running=2), member("idle", cached=9)
        assert KVAware().choose([busy, idle], {}) is idle
        assert KVAware().choose([busy, idle], {"busy": 2 * REQUEST_TOKENS + 1}) is busy
        assert KVAware().choose([member("full", cached=9), member("empty")], {}).name == "empty"

    def test_round_robin(self) -> None:
        """Each one in turn, whatever it has."""
        members, policy = [member("a"), member("b"), member("c")], RoundRobin()
        chosen = [policy.choose(members, {"a": 10_000}).name for _ in range(4)]
        assert chosen == ["a", "b", "c", "a"]


class TestTime:
    """Simulated time."""

    def test_a_step_takes_what_is_computed_and_read(self) -> None:
        """The weights, 25,000 prompt tokens a second, and the K and V of the context; an idle step takes nothing."""
        costs = StepCosts()
        assert costs.of(ObservedStep({})) == 0
        assert costs.of(ObservedStep({}, prefill_tokens=2000)) == 85
        assert costs.of(ObservedStep({}, decoding=10, context_tokens=100_000)) == 9

    def test_a_step_ends_no_sooner_than_the_trace_is_there(self) -> None:
        """A worker waits in a step that ends later, which is as good as idle for who waits for the worker."""
        clock, ended = WorkerClock(), threading.Event()

        def step() -> None:
            clock.spend(50)
            ended.set()
            clock.look_again()

        engine = threading.Thread(target=step)
        engine.start()
        clock.follow(49, lambda: False)
        assert not ended.wait(0.05)
        clock.follow(50, ended.is_set)
        assert ended.wait(10)
        engine.join()

    def test_requests_wait_for_their_time(self) -> None:
        """A request that was sent at a time which the worker has not reached is not there yet, unless it is idle."""
        clock = WorkerClock()
        inbox = Inbox(clock)
        for number, sent in enumerate((10, 20)):
            inbox.put(Waiting(Request(number, [1]), [], 1, sent))  # type: ignore[arg-type]
        assert inbox.first(5) == []
        assert inbox.next_arrival_ms == 10
        assert [each.arrival_ms for each in inbox.first(5)] == [10]
        inbox.take(1)
        assert len(inbox) == 1
        clock.begin(20)
        assert len(inbox.first(5)) == 1
        inbox.close()
        assert not inbox


@pytest.fixture
def feed() -> Iterator[tuple[FleetIndex, Feed]]:
    index = FleetIndex()
    feed = Feed(index)
    yield index, feed
    feed.close()


def sink(feed: Feed) -> str:
    return f"zmq+pub://{feed.endpoint.removeprefix('tcp://')}?connect=1&replay=0&coalesce=0s"


def test_overlap_is_what_the_cache_would_reuse(feed: tuple[FleetIndex, Feed]) -> None:
    """For prompts that begin alike, the index says of each what the manager itself would reuse in whole blocks."""
    index, ear = feed
    config = KVCacheConfig(
        max_sequence_length=400, tokens_per_block=BLOCK, primary_blocks=25, secondary_blocks=10
    )
    with KVCacheManager(config, sinks=[sink(ear)]) as manager:
        topic = manager.feeds[0].transport.topic.decode()  # type: ignore[attr-defined]
        for number in range(3):
            prompt = [number, *range(1, 200)]
            manager.add_sequence(number, prompt)
            manager.start_transfers()
            manager.store_context_blocks(number, 200)
            manager.remove_sequence(number)
            manager.flush()
        expected = {
            (first, length): manager.count_reusable([first, *range(1, length)]) * BLOCK
            for first in range(4)
            for length in (1, 2, 16, 17, 100, 160, 161, 200, 208, 209)
        }
        assert 0 < sum(map(bool, expected.values())) < len(expected)

        def agrees() -> bool:
            return all(
                index.overlap([first, *range(1, length)]).get(topic, 0) == tokens
                for (first, length), tokens in expected.items()
            )

        wait_until(agrees, "the index does not agree")
        assert index.blocks(topic) > 25
        ear.drop(topic)
        assert (index.blocks(topic), index.overlap([0, *range(1, 100)])) == (0, {})


def test_what_a_worker_has_sent_before_its_death_is_not_taken_for_news() -> None:
    """A batch that is read after the worker was dropped does not bring it back; others are heard as before."""
    index = FleetIndex()
    reported = Received(0, "", decode_batch(batch(stored(1, 2))), False)
    index.fold("dead", reported)
    assert index.overlap([1, 2, 2, 3, 9]) == {"dead": 4}
    index.drop("dead")
    index.fold("dead", reported)
    index.fold("alive", reported)
    assert (index.overlap([1, 2, 2, 3, 9]), index.blocks("dead")) == ({"alive": 4}, 0)


class TestServing:
    """One worker's engine, without HTTP."""

    @pytest.fixture
    def serving(self, feed: tuple[FleetIndex, Feed]) -> Iterator[Serving]:
        config = KVCacheConfig(max_sequence_length=3000, tokens_per_block=BLOCK, primary_blocks=200)
        serving = Serving(config, sink(feed[1]))
        yield serving
        serving.follow(10**9)
        serving.close()

    def test_time_to_first_token(self, serving: Serving) -> None:
        """A prompt takes its tokens' time; the same again only that of what cannot be reused."""
        reported: list[JobProgress] = []
        assert serving.put(list(range(2000)), 2, 100, reported.append) is None
        serving.follow(10_000)
        assert serving.put(list(range(2000)), 1, 10_000, reported.append) is None
        serving.follow(20_000)
        # 5 ms of weights, 80 ms of prompt; then 6 ms for an output with 2,000 tokens before it.
        assert reported[:2] == [JobProgress(True, 185, 0), JobProgress(False, 191, 0)]
        # The last token is computed in any case.
        assert reported[2:] == [JobProgress(True, 10_006, 1999), JobProgress(False, 10_006, 1999)]

    def test_requests_queue(self, serving: Serving) -> None:
        """What comes while a step runs begins behind it, whenever it was sent."""
        reported: list[JobProgress] = []
        serving.put(list(range(1000)), 1, 0, reported.append)
        serving.follow(10)
        assert (reported, serving.idle) == ([], False)
        serving.put([7] * 1000, 1, 10, reported.append)
        serving.follow(1000)
        # The first one ends at 45 ms; only then the second one begins.
        assert [each.at_ms for each in reported] == [45, 45, 90, 90]

    def test_what_can_never_be_served_is_refused(self, serving: Serving) -> None:
        """It is said why, and nothing waits for it."""
        assert serving.put([1] * 3000, 1, 0, print) == "3001 tokens exceed max_sequence_length 3000"
        assert serving.idle


SIZES = Sizes(blocks=120, secondary_blocks=60, tokens_per_block=64, longest=4000)
TRACE = [structs.replace(each, timestamp=each.timestamp // 8) for each in generate_chats(30)[:120]]
"""Eight times as fast, so that workers are busy enough for load to matter."""
SETTING = Setting(TRACE, 3, SIZES, speed=2)
SMALL = Setting(TRACE[:40], 2, SIZES, speed=1000)
TRACES = 15
"""Lines of all charts of three rounds with two workers."""


@dataclass(slots=True)
class Compared(Round):
    """A round, at whose end the index is compared with what each worker says that it has."""

    agreed: dict[str, bool] = field(default_factory=dict)
    agreed_late: dict[str, bool] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    faults: int = -1

    async def at_end(self, balancer: Balancer, index: FleetIndex) -> None:
        """The feeds need a moment; and a reader that comes late is told the same."""
        places = {name: each.place for name, each in balancer.members.items()}
        resident = {name: await _resident(place) for name, place in places.items()}
        self.blocks = {name: sum(map(len, each)) for name, each in resident.items()}
        self.agreed = await _agreement(index, places, resident)
        self.faults = index.faults()
        balancer._feed.close()
        late = FleetIndex()
        feed = Feed(late, balancer._feed.endpoint)
        self.agreed_late = await _agreement(late, places, resident)
        feed.close()


async def _resident(place: Place) -> list[set[int]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return [set(level) for level in (await client.get(f"{place.url}/blocks")).json()]


async def _agreement(
    index: FleetIndex, places: dict[str, Place], resident: dict[str, list[set[int]]]
) -> dict[str, bool]:
    deadline = time.monotonic() + 60
    while True:
        agreed = {name: _agrees(index, place.topic, resident[name]) for name, place in places.items()}
        if all(agreed.values()) or time.monotonic() > deadline:
            index._index.check()
            return agreed
        await asyncio.sleep(0.05)


def _agrees(index: FleetIndex, topic: str, resident: list[set[int]]) -> bool:
    """Whether a worker has just these names on the GPU and in host memory, as far as the index knows."""
    with index._lock:
        known = [
            {name for name in names if _level(index, topic, name) == level}
            for level, names in enumerate(resident)
        ]
        return (known, [*index._index.resident(topic)]) == (resident, [*map(len, resident), 0])


def _level(index: FleetIndex, topic: str, name: int) -> int | None:
    overlap = index._index.match_hashes([name]).get(WorkerRank(topic, 0), (0, 0, 0))
    return next((level for level, blocks in enumerate(overlap) if blocks), None)


def played(setting: Setting, *rounds: Compared) -> list[Compared]:
    """Play rounds with real workers."""

    async def play() -> None:
        async with Service("", dict) as service:
            for each in rounds:
                await each.play(service, setting)

    asyncio.run(play())
    return list(rounds)


def nothing_is_lost(each: Compared, setting: Setting) -> None:
    """Every request is answered, and the index is what the workers hold: block by block, in both levels, for each
    worker, without a fault on the way; and for who comes late.
    """
    assert each.tally.requests == len(setting.trace)
    assert each.tally.lost + each.tally.refused == 0
    assert each.blocks.keys() == {f"worker {number}" for number in range(1, setting.workers + 1)}
    assert each.agreed == each.agreed_late == dict.fromkeys(each.blocks, True)
    assert each.faults == 0
    assert sum(each.blocks.values()) > 100


@pytest.fixture(scope="module")
def killed() -> Compared:
    """A small round in which a worker is killed."""
    [done] = played(SMALL, Compared(KVAware(), kills=True))
    return done


def three(killed: Compared) -> list[Compared]:
    """As if all policies had done alike."""
    aware = replace(killed, kills=False, notes=[])
    return [replace(aware, policy=RoundRobin()), aware, killed]


class TestRounds:
    """The whole example: worker processes, HTTP, feeds."""

    @pytest.mark.long
    def test_knowing_who_has_what_pays(self) -> None:
        """With the same requests, routing by the feed computes fewer prompt tokens, and first tokens come sooner."""
        rounds = played(SETTING, Compared(RoundRobin()), Compared(KVAware()), Compared(KVAware(), kills=True))
        for each in rounds:
            nothing_is_lost(each, SETTING)
        blind, aware, _ = (each.tally for each in rounds)
        assert blind.prompt_tokens == aware.prompt_tokens == sum(each.input_length for each in TRACE)
        assert aware.hit_rate > blind.hit_rate + 0.05
        assert aware.percentile_ms(50) < blind.percentile_ms(50)

    def test_no_request_is_lost(self, killed: Compared) -> None:
        """Each one is answered, though a worker is killed in the middle, and the index is what the workers hold."""
        nothing_is_lost(killed, SMALL)

    def test_a_killed_worker_is_noticed_and_comes_back(self, killed: Compared) -> None:
        """What it had is out of the index at once; it comes back with nothing, and is sent requests again."""
        [(_, first), (_, second), (_, third)] = killed.notes
        assert first.startswith("worker 1 is killed; the index has ")
        assert second.startswith("worker 1 is gone")
        assert third == "worker 1 is back, with nothing cached"
        known = [(each["up"][0], each["blocks"][0]) for each in killed.samples]
        gone = [blocks for up, blocks in known if not up]
        assert gone
        assert set(gone) == {0}
        assert known[0][0]
        assert known[-1][0]
        assert killed.blocks["worker 1"] > 0

    def test_the_table(self, killed: Compared) -> None:
        """It has a line per round."""
        rounds = three(killed)
        lines = table(rounds).splitlines()
        assert [line.split("  ")[0] for line in lines[1:]] == [
            "round robin",
            "KV-aware",
            "KV-aware, one killed",
        ]
        assert f"{killed.tally.hit_rate:.1%}" in lines[2]
        assert gain(*rounds[:2]).startswith("KV-aware beside round robin: ")

    @pytest.mark.needs("chromium")
    def test_what_people_see(self, killed: Compared, tmp_path: Path) -> None:
        """The page has rows, cards and charts, needs no network, and has no error."""
        rounds = three(killed)
        state = {
            "requests": len(SMALL.trace),
            "blocks": 180,
            "workers": list(killed.blocks),
            "rounds": [each.state() for each in rounds],
        }
        file = tmp_path / "page.html"
        file.write_text(page(state), encoding="utf-8")
        with Browser(program("chromium"), tmp_path / "profile") as browser:
            browser.size(1200, 900, dark=True)
            browser.open(file)
            traces = "document.querySelectorAll('.chart .scatterlayer .trace').length"
            wait_until(lambda: browser.eval(traces) == TRACES, "")
            rows = browser.eval("[...document.querySelectorAll('#rounds tr')].map((row) => row.textContent)")
            assert len(rows) == 4
            assert browser.eval("document.querySelectorAll('#workers li').length") == 2
            assert browser.eval("document.querySelectorAll('#notes li').length") == 3
            assert browser.eval("document.documentElement.dataset.theme") == "dark"
            assert browser.errors == []
            assert browser.requests == [file.as_uri()]


def with_fleet(size: int, body: Callable[[Balancer, Fleet, TraceTime], Awaitable[Any]]) -> Any:
    """Run something with so many workers behind a balancer that takes them in turn."""

    async def run() -> Any:
        index = FleetIndex()
        feed = Feed(index)
        try:
            async with Fleet(size, SIZES, feed.endpoint) as fleet:
                clock = TraceTime(1000)
                balancer = Balancer(RoundRobin(), index, feed, clock)
                for name, place in (await fleet.start_all()).items():
                    balancer.add(name, place)
                result = await body(balancer, fleet, clock)
                await balancer.close()
                return result
        finally:
            feed.close()

    return asyncio.run(run())


async def finish(
    balancer: Balancer, clock: TraceTime, tasks: list[asyncio.Task[Served]]
) -> list[Served | BaseException]:
    while not all(task.done() for task in tasks):
        clock.now_ms += 250
        await balancer.advance(clock.now_ms)
        await asyncio.sleep(0.01)
    return await asyncio.gather(*tasks)


def test_requests_of_a_killed_worker_are_served_by_another() -> None:
    """While time stands still six requests lie at two workers; one is killed, and the other serves all of them.

    A request that no worker can ever serve is refused with the reason; all are when the last worker is gone.
    """

    async def body(balancer: Balancer, fleet: Fleet, clock: TraceTime) -> Any:
        queued = [asyncio.Event() for _ in range(6)]
        tasks = [
            asyncio.create_task(balancer.complete([number] * 300, 5, 0, each))
            for number, each in enumerate(queued)
        ]
        await asyncio.gather(*(each.wait() for each in queued))
        assert [each.running for each in balancer.members.values()] == [3, 3]
        clock.now_ms = 1000
        await fleet.kill("worker 1")
        served = await finish(balancer, clock, tasks)
        up = [each.up for each in balancer.members.values()]
        with pytest.raises(Refused) as too_long:
            await balancer.complete([1] * 5000, 1, 0, asyncio.Event())
        await fleet.kill("worker 2")
        with pytest.raises(Refused) as alone:
            await balancer.complete([1] * 10, 1, 0, asyncio.Event())
        return served, up, [(each.value.status, each.value.reason) for each in (too_long, alone)]

    served, up, refused = with_fleet(2, body)
    assert up == [False, True]
    assert [each.worker for each in served] == ["worker 2"] * 6
    assert sorted(each.attempts for each in served) == [1, 1, 1, 2, 2, 2]
    # What has to begin again begins when the loss is noticed, at 1,000 ms.
    assert {each.attempts for each in served if each.first_token_ms > 1000} == {2}
    assert refused == [
        (400, "5001 tokens exceed max_sequence_length 4000"),
        (503, "there is no worker"),
    ]


def test_tally() -> None:
    """Hit rate, percentiles and imbalance of two answers of one of two workers."""
    tally = Tally(workers=2)
    tally.served(Served("worker 1", 100, 75, 130, 200, 1), 100)
    tally.served(Served("worker 1", 300, 25, 250, 300, 2), 200)
    assert (tally.hit_rate, tally.computed_tokens, tally.retried) == (0.25, 300, 1)
    assert tally.percentile_ms(50) == 40
    assert tally.imbalance == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command plays the rounds, prints the table and writes the page; a wrong option is told in a line."""
    sizes = ("--limit", 6, "--workers", 1, "--no-kill", "--speed", 1000)
    assert main([str(each) for each in (*sizes, "--page", tmp_path / "p.html")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("6 requests for 1 workers; live at http://127.0.0.1:")
    assert "fewer prompt tokens computed" in out
    assert err == ""
    assert "<title>KV-aware routing beside round robin</title>" in (tmp_path / "p.html").read_text()
    assert main(["--workers", "0"]) == 2
    wrong = capsys.readouterr().err
    assert wrong.startswith("kv_aware_router: --workers, ")
    assert wrong.count("\n") == 1
