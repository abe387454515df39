"""Failed copies: nothing cached is kept, every running sequence begins again, and is told so."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cuda_ops.copier import Copy, CopyFailed, FinishedTicket, Ticket
from events.feed.changes import Change, Cleared
from events.feed.fold import Feed
from events.types import CacheCleared, Event, EventBatch, TransferFailed
from kvcache.decide.housekeeping import GIVEN_UP
from kvcache.errors import ComputationLost, ManagerBusy, TransfersPending
from kvcache.fold.fingerprint import fingerprint
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.fake_engine import DETACHED, FakeEngine
from tests.support.engines.inside import blocks_of, sequence_of
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.feeds.strict import resident_in

PROMPT = [0, 1, 0, 1, 1]


class Switch:
    """The batches that fail: all from now on, or none."""

    def __init__(self) -> None:
        self.on = False

    def __contains__(self, number: object) -> bool:
        return self.on


def engine_with(late: int = 0, **settings: Any) -> tuple[FakeEngine, Switch]:
    """An engine whose copies fail while the switch is on, and of which the host hears `late` ticks later."""
    switch = Switch()
    sizes: dict[str, Any] = {"primary_blocks": 6, "secondary_blocks": 6, **settings}
    return FakeEngine(wrap=lambda copier: LateCopier(FailingCopier(copier, switch), late), **sizes), switch


def fill(engine: FakeEngine, prompt: list[int]) -> None:
    engine.admit(Request("filler", prompt))
    engine.forward("filler")
    engine.end("filler")


def in_secondary(engine: FakeEngine) -> None:
    """The prompt's two blocks lie in secondary, and all copies have landed."""
    fill(engine, PROMPT)
    fill(engine, [1] * (2 * engine.manager.num_free_blocks))
    engine.settle()
    assert [block.level for block in engine.manager.match(PROMPT).blocks] == [1, 1]


def received(engine: FakeEngine) -> list[Event]:
    """All events from now on."""
    events: list[Event] = []
    engine.manager.bus.subscribe(events.append)
    return events


def test_failed_offload_clears_the_cache() -> None:
    """When a copy fails nothing stays cached, in either level, though only one block was on its way."""
    engine, switch = engine_with(primary_blocks=8)
    fill(engine, PROMPT)
    engine.admit(Request("a", [2, 2]))
    engine.forward("a")
    events = received(engine)
    switch.on = True
    engine.admit(Request("b", [1] * 10))
    assert engine.manager.count_reusable(PROMPT) == 2
    engine.start_transfers()
    polled = engine.poll()
    assert [reason for _, reason in polled.failed] == ["batch 0 was chosen to fail"]
    assert polled.landed == ()
    assert dict(polled.invalidated) == {"a": 0, "b": 0}
    assert engine.manager.count_reusable(PROMPT) == engine.manager.count_reusable([2, 2, 1]) == 0
    assert strategies.cached_blocks(engine.manager.state) == {}
    (failed, cleared) = [e for e in events if isinstance(e, TransferFailed | CacheCleared)]
    assert isinstance(failed, TransferFailed)
    assert isinstance(cleared, CacheCleared)
    assert cleared.unnamed == (1,)
    engine.verify()


class Refuses:
    """A copier that raises `error`, or returns nothing, until it is `mended`."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.mended = False

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        if self.mended:
            return FinishedTicket()
        if self.error is not None:
            raise self.error
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of memory, token 424242"), "RuntimeError"),
        (ValueError("slot 7"), "ValueError"),
        (CopyFailed("no device"), "no device"),
        (ManagerBusy(), "ManagerBusy"),
        (None, "submit must return a ticket, not NoneType"),
    ],
)
def test_a_batch_that_the_copier_does_not_take_has_failed(error: Exception | None, reason: str) -> None:
    """Whatever submit raises is told by the ticket and by poll; everything begins again, and the manager goes on."""
    copier = Refuses(error)
    manager = KVCacheManager(strategies.config(primary_blocks=6, secondary_blocks=6), copier=copier)
    manager.add_sequence("old", [1] * 12)
    manager.store_context_blocks("old", 12)
    manager.remove_sequence("old")
    manager.add_sequence("new", [2] * 12)
    ticket = manager.start_transfers()
    assert ticket is not None
    ticket.wait_on()
    with pytest.raises(CopyFailed, match=reason):
        ticket.wait()
    polled = manager.poll()
    assert {reported for _, reported in polled.failed} == {reason}
    assert dict(polled.invalidated) == {"new": 0}
    assert manager.count_reusable([1] * 12) == 0
    copier.mended = True
    manager.remove_sequence("new")
    manager.add_sequence("next", [3] * 12)
    manager.start_transfers()
    assert manager.poll().failed == ()
    manager.check()
    manager.close()


def test_all_running_sequences_begin_again() -> None:
    """Who reused the blocks, and who never had to do with them, is told to compute all; K/V is right afterwards."""
    engine, switch = engine_with(primary_blocks=8)
    in_secondary(engine)
    engine.admit(Request("other", [2, 2, 2]))
    engine.forward("other")
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]), Request("b", [0, 1, 1]))
    engine.start_transfers()
    polled = engine.poll()
    switch.on = False
    assert dict(polled.invalidated) == {"other": 0, "a": 0, "b": 0}
    engine.verify_running()
    for request_id in ("a", "b", "other"):
        assert sequence_of(engine.manager, request_id).computed == 0
        engine.forward(request_id)
    engine.settle()
    engine.verify()
    engine.verify_running()
    # Two hold the nameless slot of the first block, so it stays nameless until one of them ends.
    assert engine.manager.count_reusable(PROMPT) == 0
    assert engine.manager.count_reusable([2, 2, 2]) == 1
    engine.end("b")
    assert engine.manager.store_context_blocks("a", 6).stored_blocks == 3
    assert engine.manager.count_reusable(PROMPT) == 2
    engine.verify()


def test_what_was_computed_from_a_failed_block_goes_with_it() -> None:
    """Blocks stored behind a block whose copy then fails are not kept, and the sequence computes them again."""
    engine, switch = engine_with()
    in_secondary(engine)
    switch.on = True
    engine.admit(Request("a", [*PROMPT[:4], 0, 0, 0]))
    engine.forward("a")
    assert sequence_of(engine.manager, "a").stored == (3,)
    assert dict(engine.poll().invalidated) == {"a": 0}
    assert sequence_of(engine.manager, "a").stored == (0,)
    engine.forward("a")
    engine.verify_running()
    engine.verify()


def test_what_was_taken_over_from_secondary_goes_too() -> None:
    """A sequence's own slot that took over a block of secondary is not kept when the copy into that slot fails."""
    engine, switch = engine_with(tokens_per_block=4)
    fill(engine, [0, 1, 0, 1, 1])
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [0, 1, 1, 1, 1]))
    engine.start_transfers()
    switch.on = False
    fill(engine, [0, 1, 1, 1, 0])
    engine.admit(Request("b", [1] * 16))
    assert [block.level for block in engine.manager.match([0, 1, 1, 1, 1]).blocks] == [1]
    engine.forward("a")
    assert [block.level for block in engine.manager.match([0, 1, 1, 1, 1]).blocks] == [0]
    assert dict(engine.poll().invalidated) == {"a": 0, "b": 0}
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 0
    engine.settle()
    engine.verify()
    engine.verify_running()


@pytest.mark.parametrize("level", [0, 1])
def test_block_that_begins_with_a_failed_copy_is_not_served(level: int) -> None:
    """A block that was stored before the copy of its first tokens failed is gone, and can be stored again."""
    engine, switch = engine_with(tokens_per_block=4)
    fill(engine, [0, 1, 0, 1, 1])
    if level:
        fill(engine, [1] * 24)
    engine.settle()
    switch.on = True
    (admitted,) = engine.admit(Request("a", [0, 1, 1, 1, 1, 1]))
    assert admitted.reused_partial == 2
    engine.forward("a")
    engine.manager.add_tokens(["a"], [0])
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 1
    assert dict(engine.poll().invalidated) == {"a": 0}
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 0
    engine.verify()
    engine.forward("a")
    engine.verify()
    engine.verify_running()
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 1


def test_decoding_goes_on_after_a_cut() -> None:
    """A sequence that is cut while it decodes keeps its tokens, and gets the next ones."""
    engine, switch = engine_with(primary_blocks=8)
    fill(engine, PROMPT)
    fill(engine, [1] * 16)
    engine.settle()
    switch.on = True
    engine.admit(Request("a", PROMPT), Request("b", [1, 0, 0]))
    engine.start_transfers()
    engine.manager.add_tokens(["a", "b"], [0, 0])
    switch.on = False
    assert ("a", 0) in engine.poll().invalidated
    engine.decode(["a", "b"], [1, 1])
    engine.decode(["a", "b"], [0, 0])
    assert sequence_of(engine.manager, "a").tokens.tolist() == [*PROMPT, 0, 1, 0]
    assert sequence_of(engine.manager, "b").tokens.tolist() == [1, 0, 0, 0, 1, 0]
    engine.settle()
    engine.verify()
    engine.verify_running()


def loses_all(polled: bool) -> FakeEngine:
    """An engine whose copies have failed while "long" had let go of blocks, and "short" had not."""
    engine, switch = engine_with(num_layers=2, max_attention_window=(4, 24), primary_blocks=10)
    fill(engine, [2] * 8)
    engine.admit(Request("long", [0, 1, 0, 1, 1, 0, 1]), Request("short", PROMPT))
    engine.forward("long")
    engine.forward("short")
    switch.on = True
    engine.admit(Request("other", [1, 0, 1, 0, 1]))  # offloads
    engine.start_transfers()
    if polled:
        assert dict(engine.manager.poll().invalidated) == {"long": 0, "short": 0, "other": 0}
    switch.on = False
    return engine


def test_who_has_let_go_of_blocks_cannot_begin_again() -> None:
    """Its first blocks are gone, so nothing can be said to be computed; it is removed and added again."""
    engine = loses_all(polled=True)
    manager = engine.manager
    assert [engine.table("long", group).tolist().count(DETACHED) for group in range(2)] == [1, 0]
    before = manager.fingerprint()
    for call in (
        lambda: manager.store_context_blocks("long", 7),
        lambda: manager.add_tokens(["short", "long"], [1, 1]),
        lambda: manager.add_tokens(["long"], [1, 1], [2]),
    ):
        with pytest.raises(ComputationLost):
            call()
    assert manager.fingerprint() == before
    engine.end("long")
    engine.forward("short")
    (admitted,) = engine.admit(Request("long", [0, 1, 0, 1, 1, 0, 1]))
    assert admitted.reused_tokens >= 4  # what "short" has computed
    engine.forward("long")
    engine.decode(["short", "long"], [0, 1])
    engine.settle()
    engine.verify()
    engine.verify_running()


def test_who_has_left_all_blocks_behind_is_in_a_good_state(tmp_path: Path) -> None:
    """With a window of one token: the state is checked, replayed and resumed, and that manager refuses as before."""
    switch = Switch()
    engine = FakeEngine(
        wrap=lambda copier: FailingCopier(copier, switch),
        log=tmp_path / "log",
        primary_blocks=8,
        max_attention_window=(1, 16),
        num_layers=2,
        max_sequence_length=16,
    )
    manager = engine.manager
    fill(engine, [1, 2, 3, 4])
    engine.admit(Request("a", [5, 6, 7, 8, 9], reserve_tokens=2))
    engine.forward("a", 2)
    assert engine.table("a", 0).tolist() == [DETACHED]
    switch.on = True
    assert engine.admit(Request("b", [1, 2, 3, 9, 9]))[0].reused_partial
    manager.start_transfers()
    assert manager.poll().invalidated == (("a", 0), ("b", 0))
    manager.check()
    with pytest.raises(ComputationLost):
        manager.store_context_blocks("a", 2)
    manager.close()
    state = replay(tmp_path / "log", verify=True).state
    assert fingerprint(state) == fingerprint(manager.state)
    resumed = KVCacheManager.resume(state)
    with pytest.raises(ComputationLost) as raised:
        resumed.store_context_blocks("a", 2)
    assert raised.value.stuck
    resumed.check()
    resumed.remove_sequence("a")
    resumed.check()
    resumed.close()


def test_the_engine_gives_up_who_cannot_begin_again() -> None:
    """Only the sequence without its first blocks is removed."""
    engine = loses_all(polled=False)
    engine.poll()
    assert engine.given_up == ["long"]
    assert engine.running == ["short", "other"]
    for request_id in engine.running:
        engine.forward(request_id)
    engine.verify()
    engine.verify_running()


def test_outstanding_copies_are_given_up_with_the_one_that_failed() -> None:
    """What is still running or was never started ends with the failure, each once; it is not listed as failed."""
    engine, switch = engine_with(late=3)
    late = engine.copier
    assert isinstance(late, LateCopier)
    in_secondary(engine)
    events = received(engine)
    switch.on = True
    engine.admit(Request("a", PROMPT))
    engine.start_transfers()
    switch.on = False
    late.tick()
    engine.end("a")
    engine.admit(Request("b", [2] * 12))
    engine.start_transfers()
    late.tick()
    late.tick()
    engine.end("b", store=False)
    engine.admit(Request("c", PROMPT))
    outstanding = set(engine.manager.state.transfers)
    assert late.waiting
    assert engine.manager.transfers is not None
    assert engine.manager.transfers.pending
    polled = engine.poll()
    failed = [event for event in events if isinstance(event, TransferFailed)]
    assert [event.reason for event in failed][-1] == GIVEN_UP
    assert {transfer for transfer, _ in polled.failed} < outstanding
    assert {transfer for event in failed for transfer in array("q", event.transfers)} == outstanding
    assert not engine.manager.state.transfers
    assert engine.manager.start_transfers() is None  # nobody needs what was not started
    assert dict(polled.invalidated) == {"c": 0}
    engine.forward("c")
    for _ in range(9):
        late.tick()
        assert engine.poll().failed == ()
    engine.verify()
    engine.verify_running()


def test_a_second_failure_is_reported_as_well() -> None:
    """After everything began again, a later failure clears and cuts once more."""
    engine, switch = engine_with()
    for _ in range(2):
        in_secondary(engine)
        switch.on = True
        engine.admit(Request("a", PROMPT))
        engine.start_transfers()
        switch.on = False
        assert dict(engine.poll().invalidated) == {"a": 0}
        engine.forward("a")
        engine.verify_running()
        engine.end("a", store=False)
        engine.verify()


def test_state_after_failures_is_a_fold_of_the_events() -> None:
    """Failures are events: a second state that folds them is equal, and holds nothing that was cached."""
    engine, switch = engine_with()
    mirror = strategies.mirror_of(engine.manager)
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    switch.on = True
    engine.admit(Request("a", [*PROMPT[:4], 0, 0]))
    engine.forward("a")
    engine.poll()
    assert fingerprint(mirror) == engine.manager.fingerprint()
    assert not mirror.transfers
    assert strategies.cached_blocks(mirror) == {}
    mirror.check()


def test_failed_copy_after_clear_cuts_all_who_hold_the_block() -> None:
    """A block that lost its name on the way may be held by several: all of them begin again."""
    engine, switch = engine_with(primary_blocks=12)
    fill(engine, PROMPT)
    switch.on = True
    engine.admit(Request("a", [0, 0, 1]))  # copies the first token of the cached block
    engine.forward("a")
    engine.admit(Request("b", [0, 0, 1, 1, 1]))  # reuses what "a" has made of it
    engine.start_transfers()
    assert engine.manager.block_table("b")[0] == engine.manager.block_table("a")[0]
    blocks_of(engine.manager).housekeeping.clear()
    engine.end("a")
    assert dict(engine.poll().invalidated) == {"b": 0}
    engine.verify_running()
    engine.forward("b")
    engine.verify()
    engine.verify_running()


def test_flush_keeps_what_was_lost_until_it_is_reported() -> None:
    """An engine that flushes before it polls is held back until it has heard what to compute again."""
    engine, switch = engine_with(primary_blocks=7)
    in_secondary(engine)
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]), Request("b", [1]))
    engine.start_transfers()
    manager = engine.manager
    manager.flush()
    manager.flush()
    engine.admit(Request("later", [1]))
    before = manager.fingerprint()
    for call in (
        lambda: manager.block_table("a"),
        lambda: manager.block_tables(["later", "a"]),
        lambda: manager.store_context_blocks("a", 6),
        lambda: manager.add_tokens(["later", "a"], [1, 1]),
        lambda: manager.add_tokens(["a"], [1, 1], [2]),
    ):
        with pytest.raises(ComputationLost, match="0 tokens of request 'a' are still computed"):
            call()
    assert manager.fingerprint() == before
    manager.block_table("later")
    polled = manager.poll()
    assert polled.failed
    assert all("chosen to fail" in reason for _, reason in polled.failed)
    assert polled.invalidated == (("a", 0), ("b", 0))
    assert manager.poll().invalidated == ()
    switch.on = False
    engine.forward("a")
    engine.verify_running()


def test_what_a_request_lost_goes_with_it() -> None:
    """A later request of the same id has lost nothing."""
    engine, switch = engine_with()
    in_secondary(engine)
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]))
    engine.start_transfers()
    engine.manager.flush()
    engine.end("a")
    switch.on = False
    engine.admit(Request("a", [0, 0]))
    engine.forward("a")
    assert engine.manager.poll().invalidated == ()


def test_what_is_unnamed_still_waits_for_copies_that_were_not_started() -> None:
    """After a clear, too, nothing can have been computed from copies that nobody has started."""
    engine, _ = engine_with()
    in_secondary(engine)
    engine.admit(Request("a", [0, 1, 0, 1, 0]))
    engine.admit(Request("b", [0, 1, 0, 1, 1]))
    blocks_of(engine.manager).housekeeping.clear()
    with pytest.raises(TransfersPending):
        engine.manager.store_context_blocks("b", 5)
    with pytest.raises(TransfersPending):
        engine.manager.add_tokens(["b"], [1])


def test_closing_waits_for_what_was_given_up() -> None:
    """Copies of which nobody wants to know any more still write: the pools are given back after the last one."""
    engine, switch = engine_with(late=3)
    late = engine.copier
    assert isinstance(late, LateCopier)
    in_secondary(engine)
    switch.on = True
    engine.admit(Request("a", PROMPT))
    engine.start_transfers()
    switch.on = False
    late.tick()
    engine.admit(Request("b", [2] * 6))
    engine.start_transfers()
    late.tick()
    late.tick()
    assert engine.poll().failed
    assert late.waiting
    engine.manager.close()
    assert not late.waiting


def test_routers_are_reported_of_a_block_that_begins_with_a_copy_and_cleared_if_that_fails() -> None:
    """Stored is stored: the engine computed behind the copy. Should it fail, everything is cleared for routers too."""
    engine, switch = engine_with(late=2, tokens_per_block=4, block_hash="v2_sha256_64")
    feed, manager = Feed(), engine.manager
    seen = seen_by(feed, manager)
    fill(engine, [0, 1, 0, 1, 1])
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [0, 1, 1, 1, 1, 1]))
    engine.forward("a")
    engine.manager.add_tokens(["a"], [0])
    manager.flush()
    assert manager.state.transfers
    assert len(resident_in(feed, 0, 0)) == 2
    assert [block.landed for block in manager.match([0, 1, 1, 1, 1]).blocks] == [True]
    seen.clear()
    engine.settle()
    manager.flush()
    assert resident_in(feed, 0, 0) == set()
    assert seen == [Cleared()]


def seen_by(feed: Feed, manager: KVCacheManager) -> list[Change]:
    """What a router hears from the next flush on; it begins with what there is."""
    changes: list[Change] = []
    assert manager.state.created is not None
    feed.fold(EventBatch(0, 0, (manager.state.created, manager.state.export())))
    flush = manager.flush

    def folded() -> EventBatch | None:
        batch = flush()
        if batch is not None:
            changes.extend(feed.fold(batch))
        return batch

    manager.flush = folded  # type: ignore[method-assign]
    return changes
