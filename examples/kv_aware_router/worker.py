"""Worker process: an engine behind HTTP, and a feed of its cached blocks to the balancer.

``POST /generate`` takes ``{"prompt": [token ids], "max_tokens": N, "sent_ms": T}`` and answers with two JSON lines: one
with the first token, one at the end. It prints its address as one line on stdout, and exits when stdin is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.kv_aware_router.server import Server, address_of, free_socket
from examples.kv_aware_router.serving import JobProgress, Serving
from kvcache import KVCacheConfig


class Body(msgspec.Struct):
    """Body of ``POST /generate``."""

    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    sent_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Time of sending, in trace time."""


class Worker:
    """HTTP interface of an engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/follow", self._follow, methods=["POST"]),
                Route("/stats", self._stats),
                Route("/blocks", self._blocks),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=Body)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": str(error)}, 400)
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[JobProgress]()

        def on_progress(each: JobProgress) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, each)

        refused = self._serving.put(body.prompt, body.max_tokens, body.sent_ms, on_progress)
        if refused is not None:
            return JSONResponse({"error": refused}, 400)
        # The headers confirm that it is queued, so the simulated time may advance.
        return StreamingResponse(_lines(updates), media_type="application/jsonl")

    async def _follow(self, request: Request) -> Response:
        """Compute everything up to a trace time, then return the statistics."""
        await asyncio.to_thread(self._serving.follow, int(await request.body()))
        return JSONResponse(self._serving.stats())

    async def _stats(self, _: Request) -> Response:
        return JSONResponse(self._serving.stats())

    async def _blocks(self, _: Request) -> Response:
        """Return the names of its cached blocks, for comparison with the balancer's index."""
        if not self._serving.idle:
            return JSONResponse({"error": "requests are running: ask when they have ended"}, 409)
        return JSONResponse(self._serving.resident())


async def _lines(updates: asyncio.Queue[JobProgress]) -> AsyncIterator[bytes]:
    ended = False
    while not ended:
        each = await updates.get()
        ended = not each.first_token
        yield msgspec.json.encode(each._asdict()) + b"\n"


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="worker", description=__doc__)
    parser.add_argument("--feed", required=True, help="HOST:PORT of the balancer's end of the feed")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--secondary-blocks", type=int, required=True)
    parser.add_argument("--tokens-per-block", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True, help="tokens of the longest request")
    args = parser.parse_args()
    config = KVCacheConfig(
        max_sequence_length=args.longest,
        tokens_per_block=args.tokens_per_block,
        primary_blocks=args.blocks,
        secondary_blocks=args.secondary_blocks,
    )
    # It connects to the balancer and sends all blocks, then changes. Lost messages are requested from `replay`.
    sink = f"zmq+pub://{args.feed}?connect=1&replay=0&coalesce=5ms&heartbeat=200ms"
    asyncio.run(_serve(Serving(config, sink)))


async def _serve(serving: Serving) -> None:
    socket = free_socket()
    server = Server(Worker(serving).app)
    loop = asyncio.get_running_loop()

    def end_with_stdin() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(server.end)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    print(json.dumps({"url": address_of(socket), "topic": serving.topic}), flush=True)
    await server.serve(sockets=[socket])
    serving.close()


if __name__ == "__main__":
    main()
