"""Failed copies: what they should have brought is gone, with all that was computed from it."""

from __future__ import annotations

from typing import Any

import pytest

from cuda_ops.simulated import FailingCopier, LateCopier
from events.types import BlocksRemoved, RemoveReason, TransferFailed
from kvcache.errors import ComputationLost, TransfersPending
from kvcache.fold.check import check
from kvcache.fold.fingerprint import fingerprint
from kvcache.results import Request
from tests import strategies
from tests.fake_engine import FakeEngine

PROMPT = [0, 1, 0, 1, 1]


class Switch:
    """The batches that fail: all from now on, or none."""

    def __init__(self) -> None:
        self.on = False

    def __contains__(self, number: object) -> bool:
        return self.on


def engine_with(**settings: Any) -> tuple[FakeEngine, Switch]:
    switch = Switch()
    sizes: dict[str, Any] = {"primary_blocks": 6, "secondary_blocks": 6, **settings}
    return FakeEngine(wrap=lambda copier: FailingCopier(copier, switch), **sizes), switch


def fill(engine: FakeEngine, prompt: list[int]) -> None:
    engine.admit(Request("filler", prompt))
    engine.forward("filler")
    engine.end("filler")


def why(engine: FakeEngine, events: list[object]) -> list[RemoveReason]:
    engine.verify()
    return [
        event.why
        for event in events
        if isinstance(event, BlocksRemoved)
        for _ in range(len(event.slots) // 4)
    ]


def test_failed_offload_removes_the_blocks() -> None:
    """Blocks whose way to secondary failed are dropped, deepest first, and not matched any more."""
    engine, switch = engine_with()
    fill(engine, PROMPT)
    events: list[object] = []
    engine.manager.bus.subscribe(events.append)
    switch.on = True
    engine.admit(Request("a", [1] * 12))
    assert engine.manager.count_reusable(PROMPT) == 2
    engine.start_transfers()
    polled = engine.poll()
    assert len(polled.failed) == 1
    assert "chosen to fail" in polled.failed[0][1]
    assert polled.cut == ()
    assert engine.manager.count_reusable(PROMPT) == 0
    assert why(engine, events) == [RemoveReason.TRANSFER_FAILED] * 3
    assert any(isinstance(event, TransferFailed) for event in events)


def test_failed_onboard_cuts_all_who_hold_the_blocks() -> None:
    """All sequences that reused the blocks are told from where to compute again, and end up with the right K/V."""
    engine, switch = engine_with()
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]), Request("b", [0, 1, 1]))
    engine.start_transfers()
    polled = engine.poll()
    switch.on = False
    assert dict(polled.cut) == {"a": 0, "b": 0}
    assert engine.manager.count_reusable(PROMPT) == 0
    engine.verify_running()
    for request_id in ("a", "b"):
        engine.forward(request_id)
    engine.settle()
    engine.verify()
    engine.verify_running()
    # Both hold the nameless slot of the first block, so it stays nameless until one of them ends.
    assert engine.manager.count_reusable(PROMPT) == 0
    engine.end("b")
    assert engine.manager.store_context_blocks("a", 6).stored_blocks == 3
    assert engine.manager.count_reusable(PROMPT) == 2
    engine.verify()


def test_what_was_computed_from_a_failed_block_goes_with_it() -> None:
    """Blocks stored behind a block whose copy then fails are removed too, and the sequence computes them again."""
    engine, switch = engine_with()
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [*PROMPT[:4], 0, 0, 0]))
    engine.forward("a")
    assert engine.manager._sequence("a").stored == (3,)
    events: list[object] = []
    engine.manager.bus.subscribe(events.append)
    assert dict(engine.poll().cut) == {"a": 0}
    assert RemoveReason.UNREACHABLE in why(engine, events)
    assert engine.manager._sequence("a").stored == (0,)
    engine.forward("a")
    engine.verify_running()
    engine.verify()


@pytest.mark.parametrize("level", [0, 1])
def test_block_that_begins_with_a_failed_copy_is_removed(level: int) -> None:
    """A block that was stored before the copy of its first tokens failed is removed, not served."""
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
    assert not engine.manager.match([0, 1, 1, 1, 1]).blocks[0].landed
    assert dict(engine.poll().cut) == {"a": 0}
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 0
    engine.verify()
    engine.forward("a")
    engine.verify()
    engine.verify_running()
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 1


def test_block_that_begins_with_a_copy_lands_with_it() -> None:
    """A block stored while the copy of its first tokens is on its way has landed when that has, and joins its run."""
    engine, _ = engine_with(tokens_per_block=4)
    fill(engine, [0, 1, 0, 1, 1])
    engine.admit(Request("a", [0, 1, 1, 1, 1, 1, 1, 1, 1]))
    engine.forward("a")
    assert [block.landed for block in engine.manager.match([0, 1, 1, 1, 1, 1, 1, 1, 1]).blocks] == [
        False,
        True,
    ]
    engine.poll()
    assert [block.landed for block in engine.manager.match([0, 1, 1, 1, 1, 1, 1, 1, 1]).blocks] == [
        True,
        True,
    ]
    engine.verify()


def test_recomputed_block_that_begins_with_a_failed_copy_is_removed() -> None:
    """A slot that takes over a block of secondary is not trusted before the copy into it has landed."""
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
    (block,) = engine.manager.match([0, 1, 1, 1, 1]).blocks
    assert (block.level, block.landed) == (0, False)
    assert dict(engine.poll().cut) == {"a": 0}
    assert engine.manager.count_reusable([0, 1, 1, 1, 1]) == 0
    engine.settle()
    engine.verify()
    engine.verify_running()


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
    assert ("a", 0) in engine.poll().cut
    engine.decode(["a", "b"], [1, 1])
    engine.decode(["a", "b"], [0, 0])
    assert engine.manager._sequence("a").tokens.tolist() == [*PROMPT, 0, 1, 0]
    assert engine.manager._sequence("b").tokens.tolist() == [1, 0, 0, 0, 1, 0]
    engine.settle()
    engine.verify()
    engine.verify_running()


def test_state_after_failures_is_a_fold_of_the_events() -> None:
    """Failures are events: a second state that folds them is equal, and holds nothing that failed."""
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
    check(mirror)


def test_failed_copy_after_clear_cuts_all_who_hold_the_block() -> None:
    """A block that lost its name on the way is still waited for by every sequence that holds it."""
    engine, switch = engine_with(primary_blocks=12)
    fill(engine, PROMPT)
    switch.on = True
    engine.admit(Request("a", [0, 0, 1]))  # copies the first token of the cached block
    engine.forward("a")
    engine.admit(Request("b", [0, 0, 1, 1, 1]))  # reuses what "a" has made of it
    engine.start_transfers()
    assert engine.manager.block_table("b")[0] == engine.manager.block_table("a")[0]
    engine.manager._blocks.clear()
    engine.end("a")
    assert dict(engine.poll().cut) == {"b": 0}
    engine.verify_running()
    engine.forward("b")
    engine.verify()
    engine.verify_running()


def test_nothing_is_stored_behind_a_swapped_block_before_its_copy_landed() -> None:
    """Where another one's block takes the place of a copy, blocks computed from that copy wait for its fate."""
    for fails in (True, False):
        engine, switch = engine_with(primary_blocks=12)
        fill(engine, PROMPT)
        engine.admit(Request("first", [0, 0]))
        engine.start_transfers()
        switch.on = fails
        engine.admit(Request("a", [0, 0, 1, 1, 1]))
        engine.start_transfers()
        switch.on = False
        engine.forward("first")
        engine.write("a", 5)
        swapped = engine.manager.store_context_blocks("a", 5).swapped
        assert [index for index, _, _ in swapped] == [0]
        assert engine.manager.count_reusable([0, 0, 1, 1, 1]) == 1
        engine.poll()
        engine.verify()
        engine.verify_running()
        engine.forward("a", 5)
        engine.poll()
        assert engine.manager.count_reusable([0, 0, 1, 1, 1]) == 2
        engine.verify()
        engine.verify_running()


def test_flush_keeps_what_was_lost_until_it_is_told() -> None:
    """An engine that flushes before it polls is held back until it has heard what to compute again."""
    engine, switch = engine_with()
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]), Request("b", [1]))
    engine.start_transfers()
    manager = engine.manager
    manager.flush()
    manager.flush()
    before = manager.fingerprint()
    for call in (
        lambda: manager.block_table("a"),
        lambda: manager.block_tables(["b", "a"]),
        lambda: manager.store_context_blocks("a", 6),
        lambda: manager.add_tokens(["b", "a"], [1, 1]),
        lambda: manager.add_tokens(["a"], [1, 1], [2]),
    ):
        with pytest.raises(
            ComputationLost, match="request 'a' failed, and 0 of its tokens are still computed"
        ):
            call()
    assert manager.fingerprint() == before
    manager.block_table("b")
    polled = manager.poll()
    assert polled.failed
    assert all("chosen to fail" in reason for _, reason in polled.failed)
    assert polled.cut == (("a", 0),)
    assert manager.poll().cut == ()
    switch.on = False
    engine.forward("a")
    engine.verify_running()


def test_what_a_request_lost_goes_with_it() -> None:
    """A later request of the same id has lost nothing."""
    engine, switch = engine_with()
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    engine.settle()
    switch.on = True
    engine.admit(Request("a", [0, 1, 0, 1, 0, 0]))
    engine.start_transfers()
    engine.manager.flush()
    engine.end("a")
    switch.on = False
    engine.admit(Request("a", [0, 0]))
    engine.forward("a")
    assert engine.manager.poll().cut == ()


def test_unnamed_block_is_not_swapped_while_another_ones_copy_is_outstanding() -> None:
    """Who holds a block that a sequence which is gone had brought is still told when that copy fails."""
    engine, switch = engine_with(primary_blocks=10, secondary_blocks=10)
    late = LateCopier(engine.manager.transfers._copier, 50)  # type: ignore[union-attr]
    engine.manager.transfers._copier = engine.copier = late  # type: ignore[union-attr]
    prompt = [5, 6, 7, 8]
    fill(engine, [*prompt, 1])
    fill(engine, [1] * 20)
    engine.settle()
    assert [block.level for block in engine.manager.match([*prompt, 1]).blocks] == [1, 1]
    switch.on = True
    engine.admit(Request("a", [*prompt, 1]))
    engine.start_transfers()
    switch.on = False
    engine.admit(Request("b", [*prompt, 2, 3, 4]))
    engine.start_transfers()
    engine.manager._blocks.clear()
    engine.end("a", store=False)
    engine.admit(Request("c", [*prompt, 9]))
    engine.forward("c")
    engine.forward("b")
    engine.settle()
    engine.verify()
    engine.verify_running()
    assert engine.manager.count_reusable([*prompt, 2, 3, 4]) == 2
    engine.forward("b")
    assert engine.manager.count_reusable([*prompt, 2, 3, 4]) == 3
    engine.verify()
    engine.verify_running()


def test_what_is_unnamed_still_waits_for_copies_that_were_not_started() -> None:
    """After a clear, too, nothing can have been computed from copies that nobody has started."""
    engine, _ = engine_with()
    fill(engine, PROMPT)
    fill(engine, [1] * 12)
    engine.settle()
    engine.admit(Request("a", [0, 1, 0, 1, 0]))
    engine.admit(Request("b", [0, 1, 0, 1, 1]))
    engine.manager._blocks.clear()
    with pytest.raises(TransfersPending):
        engine.manager.store_context_blocks("b", 5)
    with pytest.raises(TransfersPending):
        engine.manager.add_tokens(["b"], [1])
