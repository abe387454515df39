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

from tests.brokers.fleet import StreamReader
from tests.brokers.server import Server
from tests.chaos import Told, told_by
from tests.sidecars import EngineProcess, Sidecar

OPTIONS = "heartbeat=100ms&coalesce=5ms&timeout=1s&max_batch=1KiB"
WORKERS = ("own", "side")
"""The engine's own feed, and the sidecar's."""
WAIT = 40.0


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


class Scene:
    """An engine with a sink, a sidecar on its log, their broker, and routers; and what befalls them."""

    def __init__(self, directory: Path, seed: int, broker: Server, resources: ExitStack) -> None:
        self.rng, self.log, self.broker = random.Random(seed), directory / "log", broker
        self._restate = ["300ms", "10min"][seed % 2]
        """Often, so that states are told and trimmed all the time; or so late that who misses one batch stays wrong."""
        self.happened: list[str] = []
        self._repairs: dict[str, tuple[float, Callable[[], object]]] = {}
        """When what is in trouble comes back, and how."""
        self._network: Network | None = None
        port = broker.port
        if broker.scheme != "kafka":  # whose clients connect where the broker says that it is
            self._network = Network(port)
            resources.callback(self._network.close)
            port = self._network.port
        self._urls = (broker.url, f"{broker.scheme}://127.0.0.1:{port}")
        self.readers = [StreamReader(url) for url in (*self._urls, *self._urls)]
        resources.callback(self._close_readers)
        self.asleep = [0] * len(self.readers)
        self.engine = self._start_engine()
        resources.callback(lambda: self.engine.kill())
        self.sidecar = self._start_sidecar()
        resources.callback(lambda: self.sidecar.kill())

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look(self.rng.uniform(0.05, 0.5))
            self._repair(by=time.monotonic())
            self._strike()

    def check(self) -> None:
        """Let all come to rest; then each router, and a late one, must know exactly what is resident."""
        self._repair()
        resident, _ = self.engine.settle()
        self.readers.append(StreamReader(self.broker.url))
        self._wait_for(resident)
        for number, reader in enumerate(self.readers):
            for worker in WORKERS:
                index = reader.indexes[worker]
                faults = index.orphans, index.repeated_stores, index.unknown_removals, index.unknown_events
                assert faults == (0, 0, 0, 0), (number, worker, faults)
                assert (index.missed_batches, index.restarts) == (0, 0), (number, worker)

    def look(self, seconds: float) -> None:
        """Have routers read for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tend_sidecar()
            for number, reader in enumerate(self.readers):
                if self.asleep[number]:
                    self.asleep[number] -= 1
                    time.sleep(0.005)
                else:
                    reader.read(5)

    def _wait_for(self, resident: Told) -> None:
        """Until all know it, and go on knowing it."""
        deadline, since = time.monotonic() + WAIT, None
        self.asleep = [0] * len(self.readers)
        while since is None or time.monotonic() - since < 0.5:
            self.look(0.05)
            wrong = [
                len(told_by(reader.indexes[worker]) ^ resident)
                for reader in self.readers
                for worker in WORKERS
            ]
            since = (since or time.monotonic()) if not any(wrong) else None
            assert time.monotonic() < deadline, (
                f"wrong about so many of {len(resident)} blocks: {wrong}; "
                f"{[reader.subscriber.unavailable for reader in self.readers]}; {self.sidecar.said[-600:]}"
            )

    def _close_readers(self) -> None:
        for reader in self.readers:
            reader.subscriber.close()

    # -- misfortune

    def _strike(self) -> None:
        """Something befalls a part that is well."""
        misfortunes: dict[str, list[Callable[[], None]]] = {
            "engine": [self._kill_engine, self._stop_engine, self._suspend_engine],
            "sidecar": [self._kill_sidecar, self._stop_sidecar, self._suspend_sidecar],
            "broker": [self._suspend_broker],
            "network": [self._cut, self._delay] if self._network is not None else [],
            "router": [self._sleep, self._come_anew],
        }
        if self.broker.scheme != "kafka":  # a mock, which cannot be started again in its place
            losses = [self._lose_end, self._empty, self._drop]
            misfortunes["broker"] += [self._kill_broker] * 3 + losses
        part = self.rng.choice(
            [part for part in misfortunes if misfortunes[part] and part not in self._repairs]
        )
        misfortune = self.rng.choice(misfortunes[part])
        self.happened.append(misfortune.__name__.strip("_"))
        misfortune()

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
        code = self.sidecar.process.wait(30)
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
        self.look(self.rng.uniform(0.0, 0.5))
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
        self.asleep[self.rng.randrange(len(self.readers))] = self.rng.choice([10, 100])

    def _come_anew(self) -> None:
        number = self.rng.randrange(len(self.readers))
        self.readers[number].subscriber.close()
        self.readers[number] = StreamReader(self._urls[number % 2])
