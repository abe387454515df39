"""A publisher of vLLM's wire format for tests: real sockets, and every way of answering that there is."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import zmq

from tests.oracles.wire_packer import pack_wire
from tests.support.waiting import WAIT_MS

END = b"\xff" * 8


def batch(*events: Any, ts: float = 1.5, rank: int | None = 0) -> bytes:
    """A payload."""
    return pack_wire([ts, list(events), rank])


def stored(
    *hashes: int, parent: int | None = None, medium: str = "GPU", group: int = 0, **more: Any
) -> dict[str, Any]:
    """A store of blocks of two tokens each, and `more` fields of it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [token for name in hashes for token in (name, name + 1)],
        "block_size": 2,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
        **more,
    }


def removed(*hashes: int, medium: str = "GPU", group: int = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """Publishes what it is told, on an XPUB socket: `wait_subscribed` returns when somebody listens."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", *, ipv6: bool = False) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.ipv6 = ipv6
        self._socket.linger = 0
        self._socket.sndhwm = 0  # nothing is lost that a test does not lose on purpose
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def subscribed(self, timeout_ms: int = 0) -> bool:
        """Whether a new subscription has come."""
        return bool(self._socket.poll(timeout_ms)) and self._socket.recv()[:1] == b"\x01"

    def wait_subscribed(self) -> None:
        """Wait for a subscription."""
        assert self.subscribed(WAIT_MS)

    def send(self, seq: int, payload: bytes, topic: bytes = b"kv") -> None:
        self.send_frames(topic, struct.pack(">Q", seq), payload)

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)


class ReplayServer:
    """Answers replay requests from `batches`, on a thread of its own."""

    def __init__(
        self,
        batches: Mapping[int, bytes],
        *,
        topics: bool = True,
        silent: bool = False,
        endpoint: str = "tcp://127.0.0.1:*",
    ) -> None:
        self.batches = dict(batches)
        self.topics = topics
        self.silent = silent
        self.starts: list[int] = []
        """What was asked for."""
        self.before_end = threading.Event()
        """The end marker is sent when this is set."""
        self.before_end.set()
        self.asked = threading.Semaphore(0)
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self.before_end.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                client, empty, start = self._socket.recv_multipart()
                assert empty == b""
                self._answer(client, int.from_bytes(start, "big"))

    def _answer(self, client: bytes, start: int) -> None:
        self.starts.append(start)
        self.asked.release()
        if self.silent:
            return
        topic = [b"kv"] if self.topics else []
        for seq in sorted(self.batches):
            if seq >= start:
                self._socket.send_multipart([client, b"", *topic, struct.pack(">Q", seq), self.batches[seq]])
        self.before_end.wait()
        self._socket.send_multipart([client, b"", *([b""] if self.topics else []), END, b""])


@contextmanager
def replaying(batches: Mapping[int, bytes], **options: Any) -> Iterator[ReplayServer]:
    """A replay server for the time of a test."""
    server = ReplayServer(batches, **options)
    try:
        yield server
    finally:
        server.close()
