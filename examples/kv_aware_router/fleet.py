"""The worker processes: start, SIGKILL, restart."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kvcache.errors import UsageError

_ROOT = Path(__file__).parent.parent.parent
_PATIENCE = 60.0
"""Seconds within which a process must have printed its address."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of each worker's cache."""

    blocks: int
    secondary_blocks: int
    """In host memory."""
    tokens_per_block: int
    longest: int
    """Tokens of the longest request."""


class Place(NamedTuple):
    """Address of a worker."""

    url: str
    topic: str
    """Topic of its feed."""


class Fleet:
    """`size` workers whose feeds connect to the endpoint `feed`."""

    def __init__(self, size: int, sizes: Sizes, feed: str) -> None:
        self.names = [f"worker {number}" for number in range(1, size + 1)]
        self._processes: dict[str, Process] = {}
        self._command = [sys.executable, "-m", "examples.kv_aware_router.worker"]
        self._command += ["--feed", feed.removeprefix("tcp://")]
        self._command += ["--blocks", str(sizes.blocks), "--tokens-per-block", str(sizes.tokens_per_block)]
        self._command += ["--secondary-blocks", str(sizes.secondary_blocks)]
        self._command += ["--longest", str(sizes.longest)]

    async def start(self, name: str) -> Place:
        """Start a worker, and wait until it serves."""
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        # In its own session: Ctrl-C is for this program only, and the worker exits when its stdin is closed.
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        self._processes[name] = process
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _PATIENCE)
        if not line:
            raise UsageError(f"{name} ended before it served: its message is above")
        return Place(**json.loads(line))

    async def start_all(self) -> dict[str, Place]:
        """Start all of them, by name."""
        places = await asyncio.gather(*map(self.start, self.names))
        return dict(zip(self.names, places, strict=True))

    async def kill(self, name: str) -> None:
        """Kill a worker by SIGKILL, without a clean shutdown."""
        self._processes[name].kill()
        await self._processes[name].wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*map(_ended, self._processes.values()))


async def _ended(process: Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
