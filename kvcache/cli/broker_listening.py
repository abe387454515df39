"""``kvcache subscribe`` at a broker: the workers of one stream."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Self, cast

from events.brokers.subscriber import BrokerSubscriber, NativeBrokerSubscriber
from events.subscribe.continuity import Report
from kvcache.cli.listening import Speaker
from kvcache.errors import UsageError

_OF_ZMQ = ("replay", "topic", "bind", "curve_key", "curve_server", "curve_clients", "insecure")


class BrokerListening:
    """What is heard there, as `kvcache.cli.listening.Listening` tells of sockets."""

    def __init__(self, args: argparse.Namespace) -> None:
        if len(args.endpoint) > 1:
            raise UsageError("a broker's stream has all workers: give its address alone")
        for name in _OF_ZMQ:
            if getattr(args, name):
                reason = f"--{name.replace('_', '-')} is for publishers over ZeroMQ: leave it out"
                raise UsageError(f"{reason}; `kvcache docs brokers` has the options of a broker's address")
        reads = NativeBrokerSubscriber if args.format == "native" else BrokerSubscriber
        self._subscriber = cast("BrokerSubscriber", reads(args.endpoint[0]))
        self._endpoint = str(self._subscriber.endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The stream."""
        return (self._endpoint,)

    @property
    def expected(self) -> list[Speaker]:
        """Nobody by name: workers come and go."""
        return []

    def poll(self, timeout_ms: int) -> Sequence[tuple[Speaker, Report]]:
        """What there is to report, after at most so many milliseconds."""
        reports = self._subscriber.poll(timeout_ms)
        return [(Speaker(self._endpoint, worker), report) for worker, report in reports]

    def connected(self, speaker: Speaker) -> bool | None:
        """A broker does not say whether a worker is there."""
        return None

    def replay(self, endpoint: str) -> str | None:
        """The stream itself is what can be read again."""
        return None

    def refused(self, endpoint: str) -> int:
        """Whom the broker refuses is told by an error."""
        return 0

    def malformed(self, endpoint: str) -> int:
        """States that could not be read; a batch that is none is told as missed."""
        return self._subscriber.malformed

    def ignored(self, endpoint: str) -> int:
        """All that write there are heard."""
        return 0

    def unanswered_seconds(self, endpoint: str) -> float:
        """Nobody is asked."""
        return 0.0

    def unavailable(self, endpoint: str) -> str | None:
        """Why the broker cannot be read at present."""
        return self._subscriber.unavailable
