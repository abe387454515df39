"""Where the requests of a run come from: a trace, or the generator of chats."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kvcache.errors import UsageError
from kvcache.workload.chats import generate_chats
from kvcache.workload.mooncake import TraceRequest, read_trace

USERS = 128
"""Conversations of a run without a trace: some seconds of work."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a cache for these requests has to know about them."""

    requests: int
    tokens: int
    """Of all prompts and outputs."""
    longest: int
    """Tokens of the longest request, prompt and output."""
    shortest: int
    digest: bytes
    """SHA-256 of the requests."""

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], stop: threading.Event) -> Sizes:
        """Add up; ends early if `stop` is set."""
        count = tokens = longest = shortest = 0
        digest = sha256()
        for request in requests:
            length = request.input_length + request.output_length
            longest, shortest = max(longest, length), min(shortest, length) if count else length
            count, tokens = count + 1, tokens + length
            digest.update(repr(request).encode())
            if stop.is_set():
                break
        return cls(count, tokens, longest, shortest, digest.digest())

    def primary_blocks(self, concurrency: int, tokens_per_block: int) -> int:
        """Room for `concurrency` requests of average length, and for the longest one."""
        average = -(-self.tokens // max(self.requests, 1))
        return max(-(-self.longest // tokens_per_block), concurrency * -(-average // tokens_per_block))


@dataclass(frozen=True, slots=True)
class Source:
    """Requests, and what they are called."""

    title: str
    requests: Iterable[TraceRequest]
    """To be played once; a trace never lies in memory as a whole."""
    sizes: Sizes


def open_trace(path: Path, limit: int | None, stop: threading.Event) -> Source:
    """The requests of a trace. Raises OSError, TraceError, and UsageError if there are none."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a directory: a trace is a file of JSON lines (`kvcache docs benchmarks`)"
        )
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is not a regular file: a trace is read twice, so it cannot come from a pipe"
        )
    sizes = Sizes.of(read_trace(path, limit), stop)
    if not sizes.requests:
        raise UsageError(f"{path} holds no requests")
    return Source(path.name, read_trace(path, limit), sizes)


def generated_chats(seed: int, limit: int | None, stop: threading.Event) -> Source:
    """The requests of a run without a trace."""
    requests = generate_chats(USERS, seed)[:limit]
    return Source(f"generated chats (seed {seed})", requests, Sizes.of(requests, stop))
