"""The clients: each sends a request at its time in the trace, and waits for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx
import msgspec

from examples.kv_aware_router.balancer import Served
from examples.kv_aware_router.tally import Tally
from kvcache.workload.traces import TraceRequest

TICK_MS = 250


class Error(msgspec.Struct):
    """Error in place of an answer."""

    error: str | None = None
    status: int = 200


async def play(
    url: str, trace: Sequence[TraceRequest], reach: Callable[[int], Awaitable[None]], tally: Tally
) -> None:
    """Play a trace against a balancer until every request is answered. `reach` advances the trace time (ms)."""
    limits = httpx.Limits(max_connections=None)
    now = 0
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        waiting: set[asyncio.Task[None]] = set()
        for request in trace:
            now = request.timestamp
            await reach(now)
            queued = asyncio.Event()
            waiting.add(asyncio.create_task(_ask(client, request, tally, queued)))
            # Time stands still until the request is queued.
            await queued.wait()
            waiting = {each for each in waiting if not _over(each)}
        while waiting := {each for each in waiting if not _over(each)}:
            now += TICK_MS
            await reach(now)


def _over(user: asyncio.Task[None]) -> bool:
    """Return True if it has its answer; raises what the task has raised."""
    return user.done() and user.result() is None


async def _ask(client: httpx.AsyncClient, request: TraceRequest, tally: Tally, queued: asyncio.Event) -> None:
    tokens = request.prompt().tolist()
    body = {"prompt": tokens, "max_tokens": max(1, request.output_length), "arrival_ms": request.timestamp}
    try:
        async with client.stream("POST", "/v1/completions", content=msgspec.json.encode(body)) as response:
            queued.set()
            content = await response.aread()
    except httpx.TransportError:
        tally.lost += 1
        return
    finally:
        queued.set()
    error = msgspec.json.decode(content, type=Error)
    if error.error is None:
        tally.served(msgspec.json.decode(content, type=Served), request.timestamp)
    elif error.status == httpx.codes.BAD_REQUEST:
        tally.refused += 1
    else:
        tally.lost += 1
