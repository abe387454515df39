"""A reference index of a tapped feed, which counts stores and removals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvcache.publish.publisher import Publisher as Sidecar
from tests.support.ports import free_port

PER_BLOCK = ("extra_keys", "lookahead_token_ids")
Block = tuple[Any, ...]


def frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(frozen, value))
    return frozenset((key, frozen(each)) for key, each in value.items()) if isinstance(value, dict) else value


class Oracle:
    """Which blocks are where, and all that was said of each, by counting stores and removals."""

    def __init__(self) -> None:
        self.copies: Counter[Block] = Counter()
        self.said: dict[Block, Any] = {}

    def take(self, payload: bytes) -> None:
        """Count what a payload says."""
        for event in msgspec.msgpack.decode(payload)[1]:
            self.announce(event)

    def announce(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind == "AllBlocksCleared":
            self.copies.clear()
            return
        place = (
            event.get("medium"),
            event.get("group_idx") or 0,
            event.get("locality"),
            event.get("ownership"),
        )
        keys = [(*place, name) for name in event["block_hashes"]]
        if kind == "BlockRemoved":
            self.copies.subtract(keys)
            return
        for at, key in enumerate(keys):
            if not self.copies[key]:
                self.said[key] = self._of_block(event, at)
        self.copies.update(keys)

    def _of_block(self, event: dict[str, Any], at: int) -> Any:
        hashes, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        said = {name: value for name, value in event.items() if value is not None and name != "block_hashes"}
        for name in PER_BLOCK:
            if name in said:
                said[name] = said[name][at]
        if len(tokens) == len(hashes) * size or not tokens:
            said["token_ids"] = tokens[at * size : (at + 1) * size]
            said["parent_block_hash"] = hashes[at - 1] if at else event["parent_block_hash"]
        return frozen({name: value for name, value in said.items() if value is not None})

    @property
    def resident(self) -> dict[Block, Any]:
        return {key: self.said[key] for key, count in self.copies.items() if count > 0}


@contextmanager
def published(log: Path, url: str | None = None) -> Iterator[str]:
    """The endpoint of a feed of the log; or that of somewhere else, named by its URL."""
    port, stop = free_port(), threading.Event()
    sidecar = Sidecar(log, [url or f"zmq+pub://127.0.0.1:{port}"])
    thread = threading.Thread(target=sidecar.run, args=(stop.is_set,))
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
