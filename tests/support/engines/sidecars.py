"""What tests of `kvcache publish` are made of: an engine that only logs, and the command, in processes of their own.

Run as a program this is the engine: it works by itself on random requests, goes on in a log that is there, and can be
killed. Beside its log it has a feed of its own, with which the sidecar's can be compared.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from events.log import LogWriter
from kvcache import KVCacheManager
from kvcache.replay import replay
from tests.support.engines.simulated import LateCopier
from tests.support.feeds.chaos import CONFIG, Engine, NoBytes, Reported, Router, Site, residency
from tests.support.forked import DEVNULL, PIPE, Forked
from tests.support.places import ROOT
from tests.support.waiting import WAIT, wait_until

SEGMENT_BYTES = 20_000
"""Small, so that segments end often."""


class LoggingEngine(Engine):
    """A manager with a log, at work on random requests; it begins a new epoch in a log that is there."""

    def __init__(self, log: Path, rng: random.Random, sinks: list[str], *, tokens: bool = True) -> None:
        self.copier = LateCopier(NoBytes(), steps=7)
        state = replay(log).state if any(log.glob("*.kvlog")) and tokens and rng.random() < 0.5 else None
        # One that was killed before its first batch has left no cache to go on with.
        if state is not None and state.created is not None and state.tokens_recorded:
            writer = LogWriter(log, resume=True, segment_bytes=SEGMENT_BYTES)
            self.manager = KVCacheManager.resume(state, log=writer, sinks=sinks)
        else:
            writer = LogWriter(log, resume=True, segment_bytes=SEGMENT_BYTES, record_tokens=tokens)
            self.manager = KVCacheManager(CONFIG, log=writer, sinks=sinks, copier=self.copier)
        self.log = writer
        self.rng = rng
        self.running = [int(request) for request in self.manager.state.handles]
        self._next_id = max(self.running, default=0) + 1

    def settle(self) -> tuple[Reported, int]:
        """Wait until all has landed and is durable; returns what is resident, and the log's last batch."""
        wait_until(self._is_at_rest, "the engine does not come to rest")
        self.manager.check()
        self.log.flush()
        return residency(self.manager), self.log.next_seq + self.log.batches_written - 1

    def _is_at_rest(self) -> bool:
        self._move()
        return self.manager.flush() is None and not self.manager.state.transfers


class Process:
    """A program of ours, which can be stopped, killed, and suspended."""

    def __init__(self, *command: Any, cwd: Path | None = None, **streams: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        module, *arguments = command
        streams = {"stdout": 1, "stderr": 2, **streams}
        self.process = Forked(module, *arguments, cwd=cwd or ROOT, env=environment, **streams)

    def suspend(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As the system does that has no memory left."""
        self.process.kill()
        self.process.communicate()


class EngineProcess(Process):
    """A `LoggingEngine` that works until it is told to settle."""

    def __init__(self, log: Path, seed: int, *sinks: str) -> None:
        super().__init__(
            "tests.support.engines.sidecars", log, seed, *sinks, stdin=PIPE, stdout=PIPE, stderr=2
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def settle(self) -> tuple[Reported, int]:
        """End the work, until `work`; returns what is resident, and the log's last batch."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("settle", file=self.process.stdin, flush=True)
        blocks, seq = json.loads(self.process.stdout.readline())
        return {(*place, tuple(tokens)) for *place, tokens in blocks}, seq

    def work(self) -> None:
        """Go on with what `settle` has ended."""
        assert self.process.stdin is not None
        print("work", file=self.process.stdin, flush=True)

    def stop(self) -> None:
        """An orderly end, which closes the log."""
        self.go_on()
        self.process.communicate("stop\n", timeout=WAIT)
        assert self.process.returncode == 0


class Sidecar(Process):
    """`kvcache publish`."""

    def __init__(self, log: Path, *sinks: str, options: tuple[Any, ...] = ()) -> None:
        arguments = [word for url in sinks for word in ("--sink", url)]
        # In the background nobody empties a pipe.
        self.errors = log.parent / f"{log.name}.stderr"
        with self.errors.open("a") as stderr:
            super().__init__(
                "kvcache", "publish", log, *arguments, *options, cwd=log.parent, stdout=DEVNULL, stderr=stderr
            )

    def stop(self) -> None:
        """An orderly end."""
        self.go_on()
        self.process.send_signal(signal.SIGTERM)
        # The second while it is still being loaded.
        assert self.process.wait(WAIT) in (143, -signal.SIGTERM), self.errors.read_text()

    @property
    def said(self) -> str:
        return self.errors.read_text()


def agree(routers: list[Router], resident: Reported, *, may_be_sent_again: bool = False) -> None:
    """Wait until all routers know exactly this, and go on knowing it; none may have seen what a feed must never say.

    `may_be_sent_again`: somebody on the way may still be starting, and then tells "cleared" and the state once more.
    A router that loses patience with an answer, as on a busy machine, forgets everything by itself, and may do so.
    """

    def reported() -> bool:
        for router in routers:
            router.asleep = 0
            router.look(1)
        return all(router.reported == resident for router in routers)

    def restarted() -> int:
        return sum(router.restarted for router in routers)

    deadline = time.monotonic() + WAIT
    while not reported():
        wrong = [len(router.reported ^ resident) for router in routers]
        assert time.monotonic() < deadline, f"routers are wrong about so many blocks: {wrong}"
    begun, end = restarted(), time.monotonic() + 0.3
    while time.monotonic() < end:
        if reported():
            continue
        by_themselves, begun = restarted() > begun, restarted()
        assert may_be_sent_again or by_themselves, (
            "a router knew what is resident, and was told something else"
        )
        while not reported():
            assert time.monotonic() < deadline, "routers are told something else again and again"
        end = time.monotonic() + 0.3
    for router in routers:
        assert not router.faults, router.faults


def site(directory: Path, seed: int, name: str = "sidecar") -> Site:
    """Where a feed is found."""
    (directory / name).mkdir(exist_ok=True)
    return Site.choose(directory / name, seed)


def main(log: str, seed: str, *sinks: str) -> None:
    """Work until told what to do."""
    engine = LoggingEngine(Path(log), random.Random(int(seed)), list(sinks))
    print("ready", flush=True)
    while True:
        if not select.select([0], [], [], 0.001)[0]:
            engine.step()
            continue
        for word in os.read(0, 4096).decode().split() or ["stop"]:
            if word == "settle":
                reported, seq = engine.settle()
                print(json.dumps([sorted(reported, key=str), seq]), flush=True)
                while not select.select([0], [], [], 0.01)[0]:
                    engine.manager.flush()  # a sink that has missed something is told the state so
            elif word == "stop":
                engine.manager.close()
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
