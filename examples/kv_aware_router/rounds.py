"""A round: a trace played with one fleet and one policy, perhaps with a worker killed on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from examples.kv_aware_router.balancer import Balancer
from examples.kv_aware_router.clock import TraceTime
from examples.kv_aware_router.feed import Feed
from examples.kv_aware_router.fleet import Fleet, Sizes
from examples.kv_aware_router.index import FleetIndex
from examples.kv_aware_router.player import TICK_MS, play
from examples.kv_aware_router.policies import Policy
from examples.kv_aware_router.service import Service
from examples.kv_aware_router.tally import Tally
from kvcache.workload.traces import TraceRequest

KILLED_AT, BACK_AT = 0.4, 0.6
"""When a worker is killed and started again, as a share of the trace's time."""


class Setting(NamedTuple):
    """Settings common to all rounds."""

    trace: Sequence[TraceRequest]
    workers: int
    sizes: Sizes
    speed: float


class Moment(NamedTuple):
    """Action at a time of the trace."""

    ms: int
    act: Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Round:
    """State and results of a round."""

    policy: Policy
    kills: bool = False
    """Whether the first worker is killed on the way."""
    tally: Tally = field(default_factory=Tally)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """State of the fleet at each tick."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """(ms of the trace, what happened)."""

    @property
    def name(self) -> str:
        """Name for tables."""
        return self.policy.name + (", one killed" if self.kills else "")

    async def play(self, service: Service, setting: Setting) -> None:
        """Play the whole trace."""
        self.tally.workers = setting.workers
        index = FleetIndex()
        feed = Feed(index)
        try:
            async with Fleet(setting.workers, setting.sizes, feed.endpoint) as fleet:
                places = await fleet.start_all()
                time = TraceTime(setting.speed)
                balancer = Balancer(
                    self.policy, index, feed, time, lambda text: self.notes.append((time.now_ms, text))
                )
                for name, place in places.items():
                    balancer.add(name, place)
                service.balancer = balancer
                await self._play(service, setting, fleet, balancer, time)
                await self.at_end(balancer, index)
                await balancer.close()
        finally:
            service.balancer = None
            feed.close()

    async def at_end(self, balancer: Balancer, index: FleetIndex) -> None:
        """Do nothing. Called when all requests are answered and all workers idle; tests override it."""

    async def _play(
        self, service: Service, setting: Setting, fleet: Fleet, balancer: Balancer, time: TraceTime
    ) -> None:
        moments = self._moments(setting, fleet, balancer, time)

        async def reach(ms: int) -> None:
            while time.now_ms < ms:
                while moments and moments[0].ms <= time.now_ms:
                    await moments.popleft().act()
                time.now_ms = min(ms, time.now_ms + TICK_MS)
                await balancer.advance(time.now_ms)
                self._sample(balancer, time)
                await time.pace()

        await play(service.url, setting.trace, reach, self.tally)
        self._sample(balancer, time)

    def _moments(self, setting: Setting, fleet: Fleet, balancer: Balancer, time: TraceTime) -> deque[Moment]:
        """Return the actions of this round: a worker is killed and restarted, or none."""
        if not self.kills:
            return deque()
        name, end = fleet.names[0], setting.trace[-1].timestamp

        async def kill() -> None:
            blocks = balancer.index.blocks(balancer.members[name].place.topic)
            self.notes.append((time.now_ms, f"{name} is killed; the index has {blocks:,} blocks of it"))
            await fleet.kill(name)

        async def start() -> None:
            balancer.add(name, await fleet.start(name))

        return deque([Moment(int(end * KILLED_AT), kill), Moment(int(end * BACK_AT), start)])

    def _sample(self, balancer: Balancer, time: TraceTime) -> None:
        members = list(balancer.members.values())
        self.samples.append(
            {
                "ms": time.now_ms,
                "hit_rate": self.tally.hit_rate,
                "computed": self.tally.computed_tokens,
                "requests": self.tally.requests,
                "load": [each.load for each in members],
                "running": [each.running for each in members],
                "blocks": [balancer.index.blocks(each.place.topic) for each in members],
                "up": [each.up for each in members],
            }
        )

    def state(self) -> dict[str, Any]:
        """Return the state for the page."""
        return {
            "name": self.name,
            "summary": self.tally.summary(),
            "ttft": sorted(self.tally.first_token_ms),
            "samples": self.samples,
            "notes": self.notes,
        }
