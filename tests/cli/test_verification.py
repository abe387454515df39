"""The router of a run's own, which compares its blocks with the cache at the end."""

from __future__ import annotations

import itertools
import threading

import pytest

from events.subscribe.continuity import Report
from events.subscribe.index import Index
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.cli import verification
from kvcache.cli.verification import FEED_URL, FeedCheck, OwnFeed
from tests.support.waiting import WAIT

REQUESTS = 40
TOKENS = 8


def compare(monkeypatch: pytest.MonkeyPatch, *, silence: float) -> FeedCheck:
    """Serve requests, a message for each, and let the router finish."""
    monkeypatch.setattr(verification, "SILENCE_SECONDS", silence)
    config = KVCacheConfig(
        max_sequence_length=TOKENS, tokens_per_block=4, primary_blocks=REQUESTS * TOKENS // 4
    )
    with KVCacheManager(config, sinks=[f"{FEED_URL}&coalesce=0ms"]) as manager:
        router = OwnFeed(manager)
        assert manager.wait_subscribers(1, WAIT)
        for number in range(REQUESTS):
            request = str(number)
            manager.add_sequence(request, range(number * TOKENS, (number + 1) * TOKENS))
            manager.store_context_blocks(request, TOKENS)
            manager.remove_sequence(request)
            manager.flush()
        return router.finish()


@pytest.mark.realtime
def test_a_slow_router_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far behind it is, as long as messages arrive."""
    fold = Index.fold

    def fold_slowly(index: Index, report: Report) -> None:
        threading.Event().wait(0.05)
        fold(index, report)

    monkeypatch.setattr(Index, "fold", fold_slowly)
    check = compare(monkeypatch, silence=1.0)
    assert (check.agrees, check.faults) == (True, 0)
    assert check.blocks[0] >= REQUESTS


def test_a_wrong_router_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that missed something differs once nothing arrives any more."""
    fold, numbers = Index.fold, itertools.count()
    monkeypatch.setattr(
        Index, "fold", lambda index, report: None if next(numbers) == 5 else fold(index, report)
    )
    check = compare(monkeypatch, silence=0.05)
    assert not check.agrees
