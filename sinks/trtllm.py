"""``?format=trtllm``: what is cached, as TensorRT-LLM tells of its own cache, a JSON object in each line.

The lines are made of a fold over all batches (`events.feed.inventory`). Where that or a reader has missed something,
all that the reader may know is removed and all that is cached is stored anew, under new numbers. The dicts hold token
ids, which are the prompts: whoever asks for them asks for those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from events.feed.inventory import Inventory
from events.formats.trtllm import PIECE_BYTES, EventDicts
from events.types import WorkerSeen
from sinks.base import Sink, SinkContext, SinkError, SinkURL, SinkURLError
from sinks.router.feed import FeedBatch, FeedSnapshot, RouterFeed
from sinks.router.numbers import FeedNumbers


class LineOutput(Sink, ABC):
    """A sink that takes bytes, too."""

    @abstractmethod
    def append(self, data: bytes) -> None:
        """Write all of it; after an error none of it is there, where that can be had."""


class LineTransport:
    """Writes a feed's batches as lines."""

    subscribers = 0
    """Nobody can know who reads a file."""

    def __init__(self, output: LineOutput, dicts: EventDicts, *, has_names: bool) -> None:
        self.output = output
        self._dicts, self._has_names = dicts, has_names

    def open(self, next_seq: int, worker: WorkerSeen | None) -> None:
        """Open the output. Raises SinkError, and what that raises."""
        if not self._has_names:
            raise SinkError("TensorRT-LLM's dicts name blocks, and these have no names: set block_hash")
        self.output.open()

    def send(self, batch: FeedBatch) -> None:
        """Write a batch. Raises what the output raises."""
        for piece in self._dicts.lines(batch.changes):
            self.output.append(piece)

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        """Let the output look whether its file is still in its place."""
        self.output.tick()

    def close(self) -> None:
        """Close the output."""
        self.output.close()


class DictFeed(RouterFeed):
    """The sink: a feed whose batches go out at once, each in one piece or more."""

    feeds_routers = False

    def __init__(self, transport: LineTransport) -> None:
        super().__init__(
            transport,
            FeedNumbers(None),
            coalesce_seconds=0,
            max_batch_bytes=1 << 62,
            heartbeat_seconds=0,
            feed=Inventory(),
        )
        self.output = transport.output

    def reopen(self) -> None:
        """Open the file again."""
        self.output.reopen()

    def resume(self, last_seq: int) -> int:
        """Go on in what an earlier one has written: all that is cached is told again."""
        self.output.resume(last_seq)
        return last_seq


def dict_feed(url: SinkURL, output: LineOutput, context: SinkContext, max_bytes: int = 0) -> DictFeed:
    """The sink for a URL with ``format=trtllm``; files have `max_bytes` at most (0: any number).

    Raises SinkURLError.
    """
    if "tokens" in url.options and url.options["tokens"].lower() not in ("1", "true"):
        reason = "TensorRT-LLM's dicts hold token ids: leave tokens= out, or take format=jsonl"
        raise SinkURLError(str(url), reason)
    if context.kind == "feed":
        reason = "format=trtllm tells of a cache, and this log of what engines told: leave it out"
        raise SinkURLError(str(url), reason)
    dicts = EventDicts(min(PIECE_BYTES, max_bytes or PIECE_BYTES))
    return DictFeed(LineTransport(output, dicts, has_names=context.key_bytes > 0))
