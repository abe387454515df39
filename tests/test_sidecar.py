"""`kvcache publish` beside an engine in another process: whatever is killed, routers know what is cached.

All in processes of their own, over real sockets; what routers hold is compared with the manager's own state, and with
what a router on the engine's own feed holds.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from events.codec import to_json
from events.log import LogReader
from tests.support.engines.sidecars import EngineProcess, Sidecar, agree, site
from tests.support.feeds.chaos import Router, Site
from tests.support.seeds import seeds
from tests.support.waiting import wait_until


class Scene:
    """A log, an engine, a sidecar with a feed and a file, and routers on the sidecar's and on the engine's own feed."""

    def __init__(self, directory: Path, seed: int, resources: ExitStack) -> None:
        self.directory, self.rng, self.resources = directory, random.Random(seed), resources
        self.log, self.lines = directory / "log", directory / "events.jsonl"
        self.site, self.own = site(directory, seed), site(directory, seed, "own")
        self.engine: EngineProcess | None = None
        self.sidecar: Sidecar | None = None
        self.routers = [self.router(self.site), self.router(self.site)]
        resources.callback(self.end)

    def router(self, where: Site) -> Router:
        router = Router(where.endpoint, where)
        router.connect(anew=True)
        self.resources.callback(router.leave)
        return router

    def start_engine(self, *, own_feed: bool = False) -> EngineProcess:
        self.engine = EngineProcess(self.log, self.rng.randrange(1 << 30), *[self.own.url] * own_feed)
        return self.engine

    def start_sidecar(self, *options: str) -> Sidecar:
        self.sidecar = Sidecar(self.log, self.site.url, f"file:{self.lines}?tokens=1", options=options)
        return self.sidecar

    def look(self, seconds: float) -> None:
        """Routers take in what is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for router in self.routers:
                router.look(5)

    def check(self) -> None:
        """When the engine is at rest, routers and the file have what it has."""
        assert self.engine is not None
        resident, seq = self.engine.settle()
        while not resident:  # it may just have cleared its cache
            self.engine.work()
            self.look(0.1)
            resident, seq = self.engine.settle()
        agree(self.routers, resident)
        wait_until(lambda: self.last_line() == seq, f"the file does not get to batch {seq}")
        recorded = [to_json(batch, 32).decode() for batch in LogReader(self.log)]
        assert self.lines.read_text().splitlines() == recorded

    def last_line(self) -> int:
        lines = self.lines.read_text().splitlines() if self.lines.exists() else []
        return int(json.loads(lines[-1])["seq"]) if lines else -1

    def end(self) -> None:
        for process in (self.engine, self.sidecar):
            if process is not None:
                process.go_on()
                process.kill()


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    with ExitStack() as resources:
        yield Scene(tmp_path, getattr(request, "param", 1), resources)


def test_routers_know_what_the_engine_holds(scene: Scene) -> None:
    """Routers of a sidecar that was there first hold what the manager does, and a router on the engine's own feed."""
    sidecar = scene.start_sidecar()
    wait_until(lambda: "no log there yet" in sidecar.said, "the sidecar does not say that it waits")
    engine = scene.start_engine(own_feed=True)
    scene.look(1.0)
    scene.routers.append(scene.router(scene.own))
    scene.check()
    engine.stop()
    sidecar.stop()


def test_a_late_sidecar_and_a_late_router(scene: Scene) -> None:
    """One that comes to a log of many segments tells the state, not its history; so does a router that comes later."""
    scene.start_engine()
    wait_until(lambda: len(list(scene.log.glob("*.kvlog"))) > 3, "the log does not grow")
    scene.start_sidecar()
    scene.look(0.5)
    scene.routers.append(scene.router(scene.site))
    scene.check()


@pytest.mark.parametrize("scene", seeds(range(12), quick=1), indirect=True)
def test_kills(scene: Scene) -> None:
    """Engine, sidecar and routers are killed, stopped and suspended at random: in the end all know what is cached."""
    endure(scene, rounds=14)


@pytest.mark.long
def test_kills_for_a_minute(tmp_path: Path) -> None:
    """The same for a minute."""
    end, seed = time.monotonic() + 60, random.SystemRandom().randrange(1 << 30)
    while time.monotonic() < end:
        (tmp_path / str(seed)).mkdir()
        with ExitStack() as resources:
            endure(Scene(tmp_path / str(seed), seed, resources), rounds=40)
        seed += 1


def endure(scene: Scene, rounds: int) -> None:
    rng, happened = scene.rng, []
    for _ in range(rounds):
        if scene.engine is None:
            scene.start_engine()
        if scene.sidecar is None:
            scene.start_sidecar()
        scene.look(rng.choice([0.05, 0.2, 0.5]))
        what = rng.choice(["kill engine", "stop engine", "kill sidecar", "stop sidecar", "suspend", "router"])
        happened.append(what)
        if what.endswith("engine"):
            assert scene.engine is not None
            scene.engine = (scene.engine.kill if what.startswith("kill") else scene.engine.stop)()
        elif what.endswith("sidecar"):
            assert scene.sidecar is not None
            scene.sidecar = (scene.sidecar.kill if what.startswith("kill") else scene.sidecar.stop)()
        elif what == "router":
            scene.routers[1].connect(anew=rng.random() < 0.5)
        elif scene.sidecar is not None:
            scene.sidecar.suspend()
            scene.look(0.2)
            scene.sidecar.go_on()
    if scene.engine is None:
        scene.start_engine()
    if scene.sidecar is None:
        scene.start_sidecar()
    scene.look(1.0)  # so that there is something to know
    try:
        scene.check()
        # One that comes back and has missed nothing is told the state under a number that it knows.
        assert not scene.routers[0].index.restarts, "numbers went back"
    except AssertionError as error:
        raise AssertionError(
            f"after {happened}: {error}\n{scene.sidecar.said if scene.sidecar else ''}"
        ) from error
