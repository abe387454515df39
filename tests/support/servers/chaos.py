"""What the chaos test of brokers is made of: a network that breaks, and processes that die, hang and come back."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.support.engines.sidecars import EngineProcess, Sidecar
from tests.support.feeds.chaos import Reported, announced_by
from tests.support.servers.fleet import StreamReader
from tests.support.servers.server import Server
from tests.support.waiting import WAIT

OPTIONS = "heartbeat=100ms&coalesce=20ms&timeout=1s&max_batch=2KiB"
WORKERS = ("own", "side")
"""The engine's own feed, and the sidecar's."""


class Network:
    """Stands before a broker's port: what comes by is late, and lost when connections are cut."""

    def __init__(self, port: int) -> None:
        self.late_seconds = 0.0
        self._to = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, there[1])
        for source, drain in ((reader, there[1]), (there[0], writer)):
            task = asyncio.ensure_future(self._pass_on(source, drain, ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    await asyncio.sleep(self.late_seconds)
                    writer.write(data)
                    await writer.drain()
        finally:
            for end in ends:
                end.transport.abort()

    def cut(self) -> None:
        """Break all connections; what is on its way is lost, be it a record or its acknowledgement."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    async def _cut(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            await self._cut()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Router:
    """Reads on a thread of its own, since a broker that hangs holds up who waits for it."""

    def __init__(self, url: str) -> None:
        self.asleep = threading.Event()
        self._reader, self._lock, self._leaving = StreamReader(url), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._reader:
            while not self._leaving.wait(0.001):
                if not self.asleep.is_set():
                    with self._lock:
                        self._reader.read()

    def leave(self) -> None:
        self._leaving.set()

    def end(self) -> None:
        self.leave()
        self._thread.join()

    def wrong(self, resident: Reported) -> list[int]:
        """By how many blocks it errs about each worker."""
        with self._lock:
            return [len(announced_by(self._reader.indexes[worker]) ^ resident) for worker in WORKERS]

    def faults(self) -> dict[str, int]:
        """What it has been told that a feed must never say, or has missed for good."""
        names = [
            "orphans",
            "repeated_stores",
            "unknown_removals",
            "unknown_events",
            "missed_batches",
            "restarts",
        ]
        with self._lock:
            indexes = list(self._reader.indexes.items())
            found = {f"{worker} {name}": getattr(index, name) for worker, index in indexes for name in names}
        return {name: count for name, count in found.items() if count}


class Scene:
    """An engine with a sink, a sidecar on its log, their broker, and routers; and what befalls them."""

    def __init__(self, directory: Path, seed: int, broker: Server, resources: ExitStack) -> None:
        self.rng, self.log, self.broker = random.Random(seed), directory / "log", broker
        self._restate = ["300ms", "10min"][seed % 2]
        """Often, so that states are told and trimmed all the time; or so late that who misses one batch stays wrong."""
        self.happened: list[str] = []
        self._to_come: list[tuple[str, Callable[[], None]]] = []
        """Parts, and what will befall them: each thing once until all have."""
        self._repairs: dict[str, tuple[float, Callable[[], object]]] = {}
        """When what is in trouble comes back, and how."""
        self._network: Network | None = None
        port = broker.port
        if broker.scheme != "kafka":  # whose clients connect where the broker says that it is
            self._network = Network(port)
            resources.callback(self._network.close)
            port = self._network.port
        self._urls = (broker.url, f"{broker.scheme}://127.0.0.1:{port}")
        self._resources = resources
        self.routers = [self._router(url) for url in (*self._urls, *self._urls)]
        self.engine = self._start_engine()
        resources.callback(lambda: self.engine.kill())
        self.sidecar = self._start_sidecar()
        resources.callback(lambda: self.sidecar.kill())

    def run(self, rounds: int) -> None:
        """A few misfortunes at a time: many of them make up for each other, since whoever starts tells all anew."""
        for _ in range(rounds):
            for _ in range(self.rng.randrange(1, 4)):
                self._strike()
                self._pass_time(self.rng.choice([0.05, 0.2, 0.4, 1.5]))
                self._repair(by=time.monotonic())
            self._check()
            self.engine.work()

    def _check(self) -> None:
        """Let all come to rest; then each router, and a late one, must know exactly what is resident."""
        self._repair()
        self.happened.append("check")
        resident, _ = self.engine.settle()
        late = self._router(self.broker.url)
        routers = [*self.routers, late]
        for router in routers:
            router.asleep.clear()
        self._wait_for(resident, routers)
        assert not any(router.faults() for router in routers), [router.faults() for router in routers]
        late.leave()

    def _wait_for(self, resident: Reported, routers: list[Router]) -> None:
        """Until all know it, and go on knowing it."""
        deadline, since = time.monotonic() + WAIT, None
        while since is None or time.monotonic() - since < 0.3:
            self._pass_time(0.02)
            wrong = [router.wrong(resident) for router in routers]
            since = (since or time.monotonic()) if not any(map(any, wrong)) else None
            assert time.monotonic() < deadline, (
                f"wrong about so many of {len(resident)} blocks: {wrong}; {self.sidecar.said[-600:]}"
            )

    def _pass_time(self, seconds: float) -> None:
        time.sleep(seconds)
        self._tend_sidecar()

    def _router(self, url: str) -> Router:
        router = Router(url)
        self._resources.callback(router.end)
        return router

    # -- misfortune

    def _strike(self) -> None:
        """The next thing that can happen befalls a part that is well."""
        if not self._to_come:
            self._to_come = self._misfortunes()
            self.rng.shuffle(self._to_come)
        at = next((at for at, (part, _) in enumerate(self._to_come) if part not in self._repairs), None)
        if at is not None:
            misfortune = self._to_come.pop(at)[1]
            self.happened.append(misfortune.__name__.strip("_"))
            misfortune()

    def _misfortunes(self) -> list[tuple[str, Callable[[], None]]]:
        of: dict[str, list[Callable[[], None]]] = {
            "engine": [self._kill_engine, self._stop_engine, self._suspend_engine],
            "sidecar": [self._kill_sidecar, self._stop_sidecar, self._suspend_sidecar],
            "broker": [self._suspend_broker],
            "router": [self._sleep, self._reconnect],
        }
        if self._network is not None:  # Kafka's mock cannot be started again in its place
            of["broker"] += [self._kill_broker, self._kill_broker, self._lose_end, self._empty, self._drop]
            of["network"] = [self._cut, self._cut, self._delay]
        return [(part, misfortune) for part, misfortunes in of.items() for misfortune in misfortunes]

    def _for_a_while(self, part: str, repair: Callable[[], object], most_seconds: float = 1.5) -> None:
        self._repairs[part] = time.monotonic() + self.rng.uniform(0.05, most_seconds), repair

    def _repair(self, by: float = float("inf")) -> None:
        """Bring back what is to come back by then, the broker first, without which others do not start."""
        due = [part for part, (at, _) in self._repairs.items() if at <= by]
        if any(part in due for part in ("engine", "sidecar")):
            due.append("broker")
        for part in sorted(due):
            if part in self._repairs:
                self._repairs.pop(part)[1]()

    def _start_engine(self) -> EngineProcess:
        self.engine = EngineProcess(self.log, self.rng.randrange(1 << 30), self._url("own"))
        return self.engine

    def _start_sidecar(self) -> Sidecar:
        self.sidecar = Sidecar(self.log, self._url("side"))
        return self.sidecar

    def _tend_sidecar(self) -> None:
        """One that did not find the broker when it started has ended, and is started again as by who deploys it."""
        code = self.sidecar.process.poll()
        if code is not None and "sidecar" not in self._repairs:
            assert code == 2, (code, self.sidecar.said)
            assert f"error: {self.broker.scheme}://" in self.sidecar.said.splitlines()[-1], self.sidecar.said
            self._start_sidecar()

    def _url(self, worker: str) -> str:
        return f"{self._urls[1]}?worker={worker}&{OPTIONS}&restate={self._restate}"

    def _kill_engine(self) -> None:
        self.engine.kill()
        self._for_a_while("engine", self._start_engine)

    def _stop_engine(self) -> None:
        self.engine.stop()
        self._for_a_while("engine", self._start_engine)

    def _suspend_engine(self) -> None:
        self.engine.suspend()
        self._for_a_while("engine", self.engine.go_on)

    def _kill_sidecar(self) -> None:
        self.sidecar.kill()
        self._for_a_while("sidecar", self._start_sidecar)

    def _stop_sidecar(self) -> None:
        self.sidecar.process.terminate()
        code = self.sidecar.process.wait(WAIT)
        assert code in (143, -signal.SIGTERM, 2), (code, self.sidecar.said)
        self._for_a_while("sidecar", self._start_sidecar)

    def _suspend_sidecar(self) -> None:
        self.sidecar.suspend()
        self._for_a_while("sidecar", self.sidecar.go_on)

    def _suspend_broker(self) -> None:
        self.broker.stop()
        self._for_a_while("broker", self.broker.go_on, 2.5)

    def _kill_broker(self) -> None:
        self.broker.kill()
        self._for_a_while("broker", self.broker.start, 2.5)

    def _lose_end(self) -> None:
        self.broker.remember()
        self._pass_time(self.rng.uniform(0.0, 0.5))
        self.broker.lose_end()
        self._for_a_while("broker", self.broker.start)

    def _empty(self) -> None:
        self.broker.empty()

    def _drop(self) -> None:
        self.broker.drop(self.rng.choice(WORKERS))

    def _cut(self) -> None:
        assert self._network is not None
        self._network.cut()

    def _delay(self) -> None:
        assert self._network is not None
        self._network.late_seconds = self.rng.choice([0.002, 0.02, 0.2])
        self._for_a_while("network", self._be_quick)

    def _be_quick(self) -> None:
        assert self._network is not None
        self._network.late_seconds = 0.0

    def _sleep(self) -> None:
        self.rng.choice(self.routers).asleep.set()  # until the next check

    def _reconnect(self) -> None:
        number = self.rng.randrange(len(self.routers))
        self.routers[number].leave()
        self.routers[number] = self._router(self._urls[number % 2])
