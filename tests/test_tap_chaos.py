"""An engine, `kvcache tap` and `kvcache publish`, each a process that is killed at random: routers know what is cached.

The engine's own feed is heard by the tap only, and the routers hear the sidecar on the tap's log; what they hold is
compared with the manager's own state.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from events.log import LogReader
from kvcache.tap.tap import state_of
from tests.support.engines.sidecars import EngineProcess, Process, Sidecar, agree, site
from tests.support.feeds.chaos import Router, Site
from tests.support.seeds import seeds
from tests.support.waiting import wait_until


class TapProcess(Process):
    """`kvcache tap`."""

    def __init__(self, own: Site, log: Path) -> None:
        self.errors = log.parent / "tap.stderr"
        listen = (own.endpoint, "--replay", own.replay_endpoint)
        with self.errors.open("a") as stderr:
            super().__init__("kvcache", "tap", *listen, "--log", log, "--resume", stderr=stderr)

    def stop(self) -> None:
        """An orderly end."""
        self.process.terminate()
        assert self.process.wait(30) in (143, -15), self.errors.read_text()


class Scene:
    """All processes, and two routers."""

    def __init__(self, directory: Path, seed: int, resources: ExitStack) -> None:
        self.rng, self.directory = random.Random(seed), directory
        self.log, self.taps = directory / "log", directory / "taps"
        self.site, self.own = site(directory, seed), site(directory, seed, "own")
        self.engine: EngineProcess | None = None
        self.tap: TapProcess | None = None
        self.sidecar: Sidecar | None = None
        self.routers = [Router(self.site.endpoint, self.site) for _ in range(2)]
        for router in self.routers:
            router.connect(anew=True)
            resources.callback(router.leave)
        resources.callback(self.end)

    def start(self) -> None:
        """What is not running."""
        self.engine = self.engine or EngineProcess(self.log, self.rng.randrange(1 << 30), self.own.url)
        self.tap = self.tap or TapProcess(self.own, self.taps)
        self.sidecar = self.sidecar or Sidecar(self.taps, self.site.url)

    def look(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for router in self.routers:
                router.look(5)

    def strike(self) -> None:
        """Something ends, in order or not."""
        victim = self.rng.choice(["engine", "tap", "sidecar"])
        process: EngineProcess | TapProcess | Sidecar = getattr(self, victim)
        self.rng.choice([process.kill, process.stop])()
        setattr(self, victim, None)

    def check(self) -> None:
        """When the engine is at rest, routers have what it has, and so has the tap's log."""
        assert self.engine is not None
        resident, _ = self.engine.settle()
        agree(self.routers, resident, may_be_sent_again=True)

        def is_recorded() -> bool:
            [worker] = state_of(self.taps).workers.values()
            return worker.num_blocks == len(resident)

        wait_until(is_recorded, "the log does not have what is resident")

    def end(self) -> None:
        for process in (self.engine, self.tap, self.sidecar):
            if process is not None:
                process.kill()


@pytest.mark.parametrize("seed", seeds(range(12), quick=1))
def test_routers_know_what_is_cached(tmp_path: Path, seed: int) -> None:
    """Over kills and restarts of each part, what routers hold at the end is what the manager holds."""
    with ExitStack() as resources:
        scene = Scene(tmp_path, seed, resources)
        for _ in range(3):
            scene.start()
            scene.look(scene.rng.uniform(0.5, 2.0))
            scene.strike()
            if scene.rng.random() < 0.3:
                scene.look(0.3)
        scene.start()
        scene.check()
        assert scene.tap is not None
        scene.tap.stop()
        assert all(batch.events for batch in LogReader(scene.taps, kind="feed"))
