"""HTTP interface of the balancer: ``POST /v1/completions``, and a live page at ``/``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.kv_aware_router.balancer import Balancer, Refused, Served
from examples.kv_aware_router.server import Server, address_of, free_socket


class Body(msgspec.Struct):
    """Body of ``POST /v1/completions``, with tokens instead of text."""

    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    arrival_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Time of arrival, in trace time."""


class Service:
    """HTTP service with one address for the balancers of all rounds."""

    def __init__(self, page: str, state: Callable[[], dict[str, Any]], port: int = 0) -> None:
        self._page, self._state = page, state
        self.balancer: Balancer | None = None
        self._socket = free_socket(port)
        self.url = address_of(self._socket)
        routes = [
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/state", self._push_state),
            Route("/", self._show_page),
        ]
        self._server = Server(Starlette(routes=routes))
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.end()
        assert self._task is not None
        await self._task

    async def _complete(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=Body)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": str(error)}, 400)
        if self.balancer is None:
            return JSONResponse({"error": "there is no worker"}, 503)
        queued = asyncio.Event()
        answer = asyncio.create_task(
            self.balancer.complete(body.prompt, body.max_tokens, body.arrival_ms, queued)
        )
        # The headers confirm that the request is queued at a worker, or was refused.
        await queued.wait()
        return StreamingResponse(_answered(answer), media_type="application/json")

    async def _push_state(self, _: Request) -> Response:
        return JSONResponse(self._state())

    async def _show_page(self, _: Request) -> Response:
        return HTMLResponse(self._page)


async def _answered(answer: asyncio.Task[Served]) -> AsyncIterator[bytes]:
    """Yield the answer, or a refusal: headers were sent, so it is in the body."""
    try:
        yield msgspec.json.encode(await answer)
    except Refused as refused:
        yield msgspec.json.encode({"error": refused.reason, "status": refused.status})
