"""The reports of whom ``kvcache subscribe`` listens to, with what there is to say about listening itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from events.brokers.address import is_broker
from events.subscribe.continuity import Report
from kvcache.cli.broker_listening import BrokerListening
from kvcache.cli.listening import Listening, Speaker
from kvcache.cli.output import Output
from kvcache.cli.process import StopSignals

_POLL_MS = 200
_PATIENCE_SECONDS = 2.0
"""Of a replay endpoint; one that is there answers at once."""
SILENCE_SECONDS = 5.0
NOTHING_HEARD = "nothing was heard from {} yet: nobody publishes there, or there is nothing new"
_REFUSED = (
    "a connection was refused because of a key that is missing, wrong, or not on the list of those that may connect; "
    "it is tried again"
)
Heard = tuple[Speaker, Report]
Source = Listening | BrokerListening


def listen(args: argparse.Namespace) -> Source:
    """At the sockets, or at the broker, that the arguments name. Raises `UsageError`."""
    if any(map(is_broker, args.endpoint)):
        return BrokerListening(args)
    return Listening(args)


def heard(
    listening: Source, stop: StopSignals, args: argparse.Namespace, out: Output
) -> Iterator[Heard | None]:
    """What there is to report, until a signal or the last batch wanted; None several times a second, to draw breath."""
    batches = 0
    troubles = _Troubles(listening, out)
    for endpoint in listening.endpoints:
        out.note(f"listening to {endpoint}")
    while not stop.is_set():
        troubles.tell()
        for speaker, report in listening.poll(_POLL_MS):
            troubles.hear(speaker.endpoint)
            yield speaker, report
            batches += bool(_has_events(report))
            if batches == args.count:
                return
        yield None


class _Troubles:
    """Tells of each trouble once."""

    def __init__(self, listening: Source, out: Output) -> None:
        self._listening, self._out = listening, out
        self._unanswered: set[str] = set()
        self._refused: set[str] = set()
        self._silent, self._begun = set(listening.endpoints), time.monotonic()
        """Where nothing was heard yet."""
        self._absent: dict[str, str | None] = {}

    def hear(self, endpoint: str) -> None:
        """Something was heard there."""
        self._silent.discard(endpoint)

    def tell(self) -> None:
        """What is to be said now."""
        if self._silent and time.monotonic() - self._begun >= SILENCE_SECONDS:
            for endpoint in sorted(self._silent):
                self._out.note(NOTHING_HEARD.format(endpoint))
            self._silent.clear()
        for endpoint in self._listening.endpoints:
            waited = self._listening.unanswered_seconds(endpoint)
            if endpoint not in self._unanswered and waited >= _PATIENCE_SECONDS:
                # Nothing is shown before the replay endpoint answers.
                self._unanswered.add(endpoint)
                replay = self._listening.replay(endpoint)
                self._out.note(f"no answer from the replay endpoint {replay} yet")
            absent = self._listening.unavailable(endpoint)
            if absent is not None and absent != self._absent.get(endpoint):
                self._out.note(f"{endpoint}: {absent}; it is tried again")
            self._absent[endpoint] = absent
            if endpoint not in self._refused and self._listening.refused(endpoint) > 1:
                self._refused.add(endpoint)
                self._out.warning(f"{endpoint}: {_REFUSED}")


def _has_events(report: Report) -> bool:
    batch = getattr(report, "batch", None)
    return batch is not None and bool(batch.events)
