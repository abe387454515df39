"""A request's way to a worker and back; to another worker, if that one is gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec

from examples.kv_aware_router.clock import TraceTime
from examples.kv_aware_router.feed import Feed
from examples.kv_aware_router.fleet import Place
from examples.kv_aware_router.index import Overlaps
from examples.kv_aware_router.member import Member
from examples.kv_aware_router.policies import Policy


class JobProgress(msgspec.Struct):
    """A line of a worker's answer."""

    first_token: bool
    at_ms: int
    cached_tokens: int


class Served(msgspec.Struct):
    """What the user gets, but for the text. Times are the trace's."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: int
    end_ms: int
    attempts: int


class Refused(Exception):
    """A worker says that it can never serve this, or there is no worker."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    prompt: list[int]
    max_tokens: int
    sent_ms: int
    queued: asyncio.Event
    """Whether it has come to a worker, or nowhere."""
    attempts: int = 1


class Balancer:
    """Routes requests to members. Belongs to one event loop; `notice` hears of members that come and go."""

    def __init__(
        self,
        policy: Policy,
        index: Overlaps,
        feed: Feed,
        time: TraceTime,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.policy, self.index = policy, index
        self.members: dict[str, Member] = {}
        self._feed, self._time, self._notice = feed, time, notice
        self._numbers = itertools.count()
        self._under_way: set[_Request] = set()
        # A worker answers when it has computed; only to reach it must not take long.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self._client.aclose()

    def add(self, name: str, place: Place) -> None:
        """A worker is there, perhaps again: a new process at a new place, of which nothing is known but its feed."""
        if name in self.members:
            self._notice(f"{name} is back, with nothing cached")
        self.members[name] = Member(name, place)

    async def complete(
        self, prompt: list[int], max_tokens: int, arrival_ms: int, queued: asyncio.Event
    ) -> Served:
        """Have a request served; `in_line` is set when it is at a worker. Raises Refused."""
        request = _Request(next(self._numbers), prompt, max_tokens, arrival_ms, queued)
        self._under_way.add(request)
        try:
            while (member := self._choose(prompt)) is not None:
                try:
                    return await self._ask(member, request)
                except httpx.TransportError:
                    request.queued.clear()
                    await self._look_after(member)
                    # Whatever was computed there is lost; elsewhere it cannot begin before now.
                    request.sent_ms = max(arrival_ms, self._time.now_ms)
                    request.attempts += 1
            raise Refused(503, "there is no worker")
        finally:
            self._under_way.discard(request)
            queued.set()

    async def advance(self, trace_ms: int) -> None:
        """The trace goes on: wait until all requests have come to a worker, and all workers so far."""
        for request in list(self._under_way):
            await request.queued.wait()
        await asyncio.gather(*(self._follow(each, trace_ms) for each in self.members.values() if each.up))

    def _choose(self, prompt: list[int]) -> Member | None:
        up = [member for member in self.members.values() if member.up]
        return self.policy.choose(up, self.index.overlap(prompt)) if up else None

    async def _ask(self, member: Member, request: _Request) -> Served:
        overlap = self.index.overlap(request.prompt).get(member.place.topic, 0)
        member.to_compute[request.number] = len(request.prompt) - overlap
        member.running += 1
        try:
            first, end = await self._stream(member, request)
        finally:
            member.to_compute.pop(request.number, None)
            member.running -= 1
        tokens = len(request.prompt)
        return Served(member.name, tokens, end.cached_tokens, first.at_ms, end.at_ms, request.attempts)

    async def _stream(self, member: Member, request: _Request) -> tuple[JobProgress, JobProgress]:
        body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "sent_ms": request.sent_ms}
        url = f"{member.place.url}/generate"
        updates: list[JobProgress] = []
        async with self._client.stream("POST", url, content=msgspec.json.encode(body)) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise Refused(response.status_code, response.json().get("error", "refused"))
            request.queued.set()
            async for line in response.aiter_lines():
                updates.append(msgspec.json.decode(line, type=JobProgress))
                # Its prompt is computed: what comes now weighs little.
                member.to_compute.pop(request.number, None)
        if len(updates) < 2:
            raise httpx.RemoteProtocolError("the answer breaks off")
        return updates[0], updates[-1]

    async def _follow(self, member: Member, trace_ms: int) -> None:
        try:
            answer = await self._client.post(f"{member.place.url}/follow", content=str(trace_ms))
            member.stats = answer.json()
        except httpx.TransportError:
            await self._look_after(member)

    async def _look_after(self, member: Member) -> None:
        """Take a member out if nobody is there any more; a connection that broke is no proof."""
        try:
            await self._client.get(f"{member.place.url}/stats", timeout=5.0)
        except httpx.TimeoutException:
            pass  # it is slow, and alive
        except httpx.TransportError:
            if member.up:
                member.up = False
                self._feed.drop(member.place.topic)
                self._notice(f"{member.name} is gone; what it had cached is forgotten")
