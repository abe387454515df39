"""The thread that reads the feeds of all workers."""

from __future__ import annotations

import threading

from events.subscribe.fan_in import FanInSubscriber, Worker, replay_in_topic
from examples.kv_aware_router.index import Overlaps

_POLL_MS = 50


class Feed:
    """Listener to which each worker's `zmq+pub:` sink connects. A worker sends all its blocks first, then changes."""

    def __init__(self, index: Overlaps, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self._index = index
        self._fan_in = FanInSubscriber(endpoint, replay=replay_in_topic, topic="kv@")
        self.endpoint = self._fan_in.endpoint
        self._gone: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="feed", daemon=True)
        self._thread.start()

    def drop(self, topic: str) -> None:
        """Forget a worker that is gone."""
        self._index.drop(topic)
        self._gone.append(topic)

    def close(self) -> None:
        """Stop listening."""
        self._end.set()
        self._thread.join()

    def _listen(self) -> None:
        with self._fan_in as subscriber:
            while not self._end.is_set():
                for worker, report in subscriber.poll(_POLL_MS):
                    self._index.fold(worker.topic, report)
                while self._gone:
                    subscriber.forget(Worker(self._gone.pop()))
