"""Routing of requests to workers, and to another worker if the first is gone."""

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
    """Answer to a user, without the text. Times are trace times."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: int
    end_ms: int
    attempts: int


class Refused(Exception):
    """A worker can never serve this request, or there is no worker."""

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
    """Set once a worker has queued it, or it was refused."""
    attempts: int = 1


class Balancer:
    """Router of requests to members, in one event loop. `notice` is called when a member joins or leaves."""

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
        # A worker answers once it has computed: only the time to connect is limited.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def add(self, name: str, place: Place) -> None:
        """Add a worker, perhaps a restarted one: a new process with a new address and an empty cache."""
        if name in self.members:
            self._notice(f"{name} is back, with nothing cached")
        self.members[name] = Member(name, place)

    async def complete(
        self, prompt: list[int], max_tokens: int, arrival_ms: int, queued: asyncio.Event
    ) -> Served:
        """Serve a request; sets `queued` once a worker has it. Raises `Refused`."""
        request = _Request(next(self._numbers), prompt, max_tokens, arrival_ms, queued)
        self._under_way.add(request)
        try:
            while (member := self._choose(prompt)) is not None:
                try:
                    return await self._ask(member, request)
                except httpx.TransportError:
                    request.queued.clear()
                    await self._look_after(member)
                    # What was computed there is lost; on another worker it begins now.
                    request.sent_ms = max(arrival_ms, self._time.now_ms)
                    request.attempts += 1
            raise Refused(503, "there is no worker")
        finally:
            self._under_way.discard(request)
            queued.set()

    async def advance(self, trace_ms: int) -> None:
        """Advance the trace time: wait until all requests are queued, and all workers have reached that time."""
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
                # Its prompt is computed: what remains is little load.
                member.to_compute.pop(request.number, None)
        if len(updates) < 2:
            raise httpx.RemoteProtocolError("the answer is incomplete")
        return updates[0], updates[-1]

    async def _follow(self, member: Member, trace_ms: int) -> None:
        try:
            answer = await self._client.post(f"{member.place.url}/follow", content=str(trace_ms))
            member.stats = answer.json()
        except httpx.TransportError:
            await self._look_after(member)

    async def _look_after(self, member: Member) -> None:
        """Remove a member if its process is gone; a broken connection alone does not prove that."""
        try:
            await self._client.get(f"{member.place.url}/stats", timeout=5.0)
        except httpx.TimeoutException:
            pass  # slow, but alive
        except httpx.TransportError:
            if member.up:
                member.up = False
                self._feed.drop(member.place.topic)
                self._notice(f"{member.name} is gone; what it had cached is forgotten")
