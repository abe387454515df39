"""``stdout:`` prints events as they happen.

``stdout:`` prints human-readable lines (`sinks.render`), ``stdout:?format=jsonl`` one JSON object per batch. Token ids
are never part of the lines, and of the JSON only with ``&tokens=1``. ``stdout:?format=trtllm`` prints TensorRT-LLM's
events of a cache, with them (`sinks.trtllm`).

It writes to a descriptor of its own and not through `sys.stdout`, because it would hold the lock of that for as long as
a reader does not read: an engine that flushes its own prints would wait there, and so would the interpreter's exit.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

import msgspec

from events.codec import to_json
from events.log.durable import write_all
from events.types import EventBatch
from sinks.base import SinkContext, SinkError, SinkURL
from sinks.render import StreamNames, render_batch
from sinks.trtllm import DictFeed, LineOutput, dict_feed


class StdoutOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    format: Literal["text", "jsonl", "trtllm"] = "text"
    tokens: bool = False


class StdoutSink(LineOutput):
    """Prints batches to the process's standard output."""

    def __init__(self, options: StdoutOptions, key_bytes: int) -> None:
        self.needs_tokens = options.tokens
        self._options = options
        self._key_bytes = key_bytes
        self._known = StreamNames(key_bytes)
        self._fd = -1

    def open(self) -> None:
        """Take a descriptor of standard output. Raises SinkError if there is none, as in a notebook."""
        try:
            # Earlier prints stay before.
            sys.stdout.flush()
            self._fd = os.dup(sys.stdout.fileno())
        except (AttributeError, OSError):
            raise SinkError("standard output is not a file here: use file:///path/events.jsonl") from None

    def write(self, batch: EventBatch) -> None:
        """Print one batch."""
        if self._options.format == "jsonl":
            self.append(to_json(batch, self._key_bytes, tokens=self._options.tokens) + b"\n")
        else:
            self.append("".join(f"{line}\n" for line in render_batch(batch, self._known)).encode())

    def append(self, data: bytes) -> None:
        """Print whole lines. Raises OSError."""
        write_all(self._fd, [data])

    def close(self) -> None:
        """Close the descriptor; standard output itself stays open."""
        os.close(self._fd)


def create(url: SinkURL, context: SinkContext) -> StdoutSink | DictFeed:
    """Create the sink for a ``stdout:`` URL."""
    options = url.read_options(StdoutOptions)
    if url.host is not None or url.port is not None or url.path:
        raise url.error("stdout has no path; use stdout: or stdout:?format=jsonl")
    if options.tokens and options.format == "text":
        raise url.error("format=text never shows tokens; use stdout:?format=jsonl&tokens=1")
    sink = StdoutSink(options, context.key_bytes)
    return dict_feed(url, sink, context) if options.format == "trtllm" else sink
