"""What a preempted request finds of its own is counted apart from what requests share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from events.bus import EventBus
from events.ids import Handle
from events.log import LogReader
from events.types import Namespace, SequenceAdded, SequenceRemoved, TransferFailed
from kvcache.cli.summary import _requests
from kvcache.manager import KVCacheManager
from kvcache.record import counting
from kvcache.record.counting import StatsCounter
from kvcache.stats import Stats
from kvcache.workload.summary import RunResult, StepTimes
from tests.support.engines import strategies


def cache(**options: Any) -> KVCacheManager:
    return KVCacheManager(strategies.config(primary_blocks=12), **options)


def compute(manager: KVCacheManager, request_id: str, tokens: list[int], **options: Any) -> int:
    """Admit and compute a prompt; how many of its tokens were reused."""
    admission = manager.add_sequence(request_id, tokens, **options)
    manager.store_context_blocks(request_id, len(tokens))
    return admission.reused_tokens


def counted(manager: KVCacheManager) -> tuple[int, int, float]:
    """Reused tokens, own ones among them, and the hit rate."""
    manager.flush()
    stats = manager.stats()
    return stats.reused_tokens, stats.reused_tokens_own, stats.hit_rate


def test_request_that_returns_alone_hits_nothing() -> None:
    """A request that is preempted again and again beside nobody finds its own blocks: no hit."""
    manager = cache()
    tokens = [1, 2, 3, 4, 5]
    compute(manager, "a", tokens)
    for sampled in (6, 7, 8, 9):
        manager.add_tokens(["a"], [sampled])
        tokens.append(sampled)
        manager.remove_sequence("a")
        compute(manager, "a", tokens)
    # Each time all but the last token; the partial block at the end is copied.
    assert counted(manager) == (5 + 6 + 7 + 8, 5 + 6 + 7 + 8, 0.0)


def test_what_others_had_computed_stays_a_hit() -> None:
    """Only the tokens behind those that were reused at the first admission are the request's own."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 9])
    assert compute(manager, "a", [1, 2, 3, 4, 5, 6, 7]) == 4
    manager.remove_sequence("a")
    assert compute(manager, "a", [1, 2, 3, 4, 5, 6, 7]) == 6
    assert counted(manager) == (10, 2, 8 / 17)


def test_who_was_preempted_before_it_computed_anything_owns_nothing() -> None:
    """What it finds when it returns is what others had computed, as the first time."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 9])
    assert manager.add_sequence("a", [1, 2, 3, 4, 5]).reused_tokens == 4
    manager.remove_sequence("a", why="preempted")
    assert compute(manager, "a", [1, 2, 3, 4, 5], resumed=True) == 4
    assert counted(manager) == (8, 0, 8 / 15)


@pytest.mark.parametrize("resumed", [False, True])
def test_branch_that_returns_owns_what_its_parent_owned(resumed: bool) -> None:
    """And what it has computed since; what its parent had shared with others stays a hit."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 9])
    assert compute(manager, "parent", [1, 2, 3, 4, 5, 6]) == 4
    manager.fork("parent", "branch")
    manager.add_tokens(["branch"], [7, 8, 9], [3])
    manager.remove_sequence("branch", why="preempted")
    assert compute(manager, "branch", [1, 2, 3, 4, 5, 6, 7, 8, 9], resumed=resumed) == 8
    assert counted(manager)[:2] == (12, 4)


def test_what_was_taken_back_and_computed_otherwise_is_own() -> None:
    """Also where a request goes back into what it had found at first."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 5, 9])
    assert compute(manager, "a", [1, 2, 3, 4, 5, 6]) == 5
    manager.rewind("a", 3)
    manager.add_tokens(["a"], [7, 8, 9], [3])
    manager.remove_sequence("a", why="preempted")
    assert compute(manager, "a", [1, 2, 3, 7, 8, 9]) == 5
    assert counted(manager)[:2] == (10, 3)


def test_what_was_evicted_meanwhile_and_computed_again_is_own() -> None:
    """A request that returns and has to compute again what it once shared owns that as well."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 9])
    manager.remove_sequence("other")
    compute(manager, "a", [1, 2, 3, 4, 5])
    manager.remove_sequence("a")
    manager.clear()
    assert compute(manager, "a", [1, 2, 3, 4, 5]) == 0
    manager.remove_sequence("a")
    assert compute(manager, "a", [1, 2, 3, 4, 5]) == 4
    assert counted(manager)[:2] == (8, 4)


@pytest.mark.parametrize(("why", "resumed"), [("preempted", False), ("finished", True), ("aborted", True)])
def test_who_says_that_it_returns_owns_whatever_its_prompt_is(why: str, resumed: bool) -> None:
    """Of a longer prompt, too: by its length alone it would be another request."""
    manager = cache()
    compute(manager, "a", [1, 2, 3, 4, 5])
    manager.remove_sequence("a", why=why)
    assert compute(manager, "a", [1, 2, 3, 4, 5, 6, 7], resumed=resumed) == 5
    assert counted(manager)[:2] == (5, 5)


def test_who_says_that_it_returns_to_a_manager_that_knows_nothing_of_it_has_no_hits() -> None:
    """Whatever it finds may be its own: what ran before this manager was made is unknown."""
    manager = cache()
    compute(manager, "other", [1, 2, 3, 4, 5])
    assert compute(manager, "a", [1, 2, 3, 4, 5], resumed=True) == 4
    assert counted(manager)[:2] == (4, 4)


def test_after_a_failed_copy_all_is_own() -> None:
    """A failed copy makes each sequence compute all of its tokens, also those that it had reused."""
    bus = EventBus()
    counter = StatsCounter(bus)
    added = SequenceAdded(Handle(1), "a", Namespace(), 5, bytes(20), 4, (4,), (0,), 0)
    for event in (
        added,
        TransferFailed(bytes(8), "lost"),
        SequenceRemoved(Handle(1), (2,), (b"",), 5, 5),
        msgspec.structs.replace(added, handle=2),
    ):
        bus.publish(event)
    counter.publish(cache().state, 0)
    assert (counter.read().reused_tokens, counter.read().reused_tokens_own) == (8, 4)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [([1, 2, 3, 4, 5, 6, 7], {}), ([1, 2, 3, 4], {}), ([1, 2, 3, 4, 5], {"lora_id": 1})],
    ids=["a longer prompt", "a shorter prompt", "another namespace"],
)
def test_other_request_of_the_same_id_does_not_return(tokens: list[int], options: dict[str, Any]) -> None:
    """A later turn of a conversation, or whatever else gets an old id, counts as any request."""
    manager = cache()
    compute(manager, "a", [1, 2, 3, 4, 5])
    manager.add_tokens(["a"], [6])
    manager.remove_sequence("a")
    reused = compute(manager, "a", tokens, **options)
    assert counted(manager) == (reused, 0, reused / (5 + len(tokens)))


def test_removed_requests_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many removed requests are remembered, and no more."""
    monkeypatch.setattr(counting, "REMEMBERED", 2)
    manager = cache()
    for name in ("a", "b", "c"):
        compute(manager, name, [ord(name)] * 3)
        manager.remove_sequence(name)
    for name in ("a", "b"):
        assert compute(manager, name, [ord(name)] * 3) == 2
    assert counted(manager)[:2] == (4, 2)


def test_reader_of_a_log_counts_alike(tmp_path: Path) -> None:
    """The same counters, fed with what a log recorded, come to the same."""
    with cache(log=tmp_path / "log") as manager:
        for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 3, 4]):
            compute(manager, "a", tokens)
            manager.add_tokens(["a"], [4])
            manager.remove_sequence("a")
    bus = EventBus()
    counter = StatsCounter(bus)
    for batch in LogReader(tmp_path / "log"):
        for event in batch.events:
            bus.publish(event)
    counter.publish(manager.state, 0)
    reported, read = manager.stats(), counter.read()
    assert (
        (read.reused_tokens, read.reused_tokens_own)
        == (reported.reused_tokens, reported.reused_tokens_own)
        == (5, 5)
    )


@pytest.mark.parametrize("own", [0, 1234])
def test_summary_reports_own_tokens_if_there_are_any(own: int) -> None:
    """The summary of a run has no word of them where no request came back."""
    result = RunResult(StepTimes())
    outcome = SimpleNamespace(result=result, stats=Stats(prompt_tokens=2000, reused_tokens_own=own))
    text = str(list(_requests(outcome)))  # type: ignore[arg-type]
    assert ("1,234 by requests that had computed them" in text) == bool(own)
