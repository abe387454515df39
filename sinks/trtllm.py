"""``?format=trtllm``: the cached blocks, in the form of TensorRT-LLM's own events, a JSON object per line.

The lines are made of a fold over all batches (`events.feed.inventory`). After that or a reader has missed batches, all
blocks that the reader may know are removed and all cached ones are stored anew, under new numbers. The dicts hold token
ids, which are the prompts: choosing the format includes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from events.feed.inventory import Inventory
from events.formats.trtllm import PIECE_BYTES, EventDicts
from events.types import WorkerSeen
from sinks.base import Sink, SinkContext, SinkError, SinkURL
from sinks.router.feed import FeedBatch, FeedSnapshot, RouterFeed
from sinks.router.numbers import FeedNumbers


class LineOutput(Sink, ABC):
    """A sink that accepts bytes as well."""

    @abstractmethod
    def append(self, data: bytes) -> None:
        """Write all of it; after an error none of it is there, if that is possible."""


class LineTransport:
    """Writes a feed's batches as lines."""

    subscribers = 0
    """The readers of a file cannot be known."""

    def __init__(self, output: LineOutput, dicts: EventDicts, *, has_names: bool) -> None:
        self.output = output
        self._dicts, self._has_names = dicts, has_names

    def open(self, next_seq: int, worker: WorkerSeen | None) -> None:
        """Open the output. Raises SinkError, and the output's errors."""
        if not self._has_names:
            raise SinkError("TensorRT-LLM's dicts require block names: set block_hash")
        self.output.open()

    def send(self, batch: FeedBatch) -> None:
        """Write a batch. Raises the output's errors."""
        for piece in self._dicts.lines(batch.changes):
            self.output.append(piece)

    def tick(self, take_state: Callable[[], FeedSnapshot]) -> None:
        """Let the output check that its file is still in its place."""
        self.output.tick()

    def close(self) -> None:
        """Close the output."""
        self.output.close()


class DictFeed(RouterFeed):
    """A feed that sends each batch at once, in one or more pieces."""

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
        """Reopen the file."""
        self.output.reopen()

    def resume(self, last_seq: int) -> int:
        """Continue the output of an earlier process: all cached blocks are stored again."""
        self.output.resume(last_seq)
        return last_seq


def dict_feed(url: SinkURL, output: LineOutput, context: SinkContext, max_bytes: int = 0) -> DictFeed:
    """Create the sink for a URL with ``format=trtllm``; files have `max_bytes` at most (0: any number).

    Raises SinkURLError.
    """
    if "tokens" in url.options and url.options["tokens"].lower() not in ("1", "true"):
        raise url.error("TensorRT-LLM's dicts always contain token ids: omit tokens=, or use format=jsonl")
    if context.kind == "feed":
        raise url.error(
            "format=trtllm describes a cache, but this log records what engines published: use another format"
        )
    dicts = EventDicts(min(PIECE_BYTES, max_bytes or PIECE_BYTES))
    return DictFeed(LineTransport(output, dicts, has_names=context.key_bytes > 0))
