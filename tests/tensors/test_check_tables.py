"""With `debug_check_tables`, an engine that uses tables too late, or copies too early, is told before it computes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from cuda_ops.copier import CopyFailed
from kvcache import CROSS_WINDOW, KVCacheManager, Layout
from kvcache.calls.tables import TableTracker
from kvcache.errors import (
    ComputationLost,
    StaleTables,
    TransfersNotAwaited,
    TransfersPending,
    UsageError,
)
from kvcache.pools import Pools
from tests.support.engines import strategies
from tests.support.engines.simulated import FailingCopier, LateCopier


def cache(**settings: Any) -> KVCacheManager:
    """Two sequences with their prompts computed, of 3 and 4 tokens in blocks of 2."""
    sizes = {"primary_blocks": 12, "debug_check_tables": True}
    manager = KVCacheManager(strategies.config(**(sizes | settings)))
    for name, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 4, 5])):
        manager.add_sequence(name, prompt)
        manager.store_context_blocks(name, len(prompt))
    return manager


Ask = Callable[[KVCacheManager], Any]
OF_BLOCKS: dict[str, Ask] = {
    "block_table": lambda m: m.block_table("a"),
    "block_tables": lambda m: m.block_tables(["a", "b"]),
    "padded_tables": lambda m: m.tables.padded(("a", "b")),
}
OF_STEPS: dict[str, Ask] = {
    "paged_tables": lambda m: m.tables.paged(["a", "b"]),
    "slot_mapping": lambda m: m.tables.slot_mapping(["a", "b"], starts=[2, 3], stops=[3, 4]),
    "sequence_lengths": lambda m: m.tables.sequence_lengths(["a"]),
}
CHANGES: dict[str, Callable[[KVCacheManager], object]] = {
    "append into a new block": lambda m: m.add_tokens(["a"], [7, 8], [2]),
    "reserve": lambda m: m.reserve(["a"], [4]),
    "rewind": lambda m: m.rewind("a", 2),
    "remove": lambda m: m.remove_sequence("a"),
    "remove and add again": lambda m: (m.remove_sequence("a"), m.add_sequence("a", [1, 2, 3])),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ask", OF_BLOCKS)
def test_tables_older_than_a_change_are_found(ask: str, change: str) -> None:
    """Made before a call that gave a sequence other blocks, a table is refused; made again, it is not."""
    manager = cache()
    tables = OF_BLOCKS[ask](manager)
    manager.tables.check(tables)
    CHANGES[change](manager)
    with pytest.raises(StaleTables, match="'a'") as raised:
        manager.tables.check(tables)
    assert raised.value.request_id == "a"
    if change != "remove":
        manager.tables.check(OF_BLOCKS[ask](manager))


@pytest.mark.parametrize("ask", OF_BLOCKS | OF_STEPS)
def test_what_concerns_others_makes_nothing_stale(ask: str) -> None:
    """Admissions and ends of other sequences leave these as they are."""
    manager = cache()
    tables = (OF_BLOCKS | OF_STEPS)[ask](manager)
    manager.add_sequence("c", [1, 2, 3, 9])
    manager.store_context_blocks("c", 4)
    manager.remove_sequence("c")
    manager.flush()
    manager.tables.check(tables)


@pytest.mark.parametrize("ask", OF_STEPS)
def test_tables_of_a_step_are_stale_when_it_was_reported(ask: str) -> None:
    """The token goes into a block that is there, but the step's tokens are others."""
    manager = cache()
    tables = OF_STEPS[ask](manager)
    manager.tables.check(tables)
    kept = manager.block_table("a")
    manager.add_tokens(["a"], [7])
    manager.tables.check(kept)
    with pytest.raises(StaleTables):
        manager.tables.check(tables)


def test_a_table_that_points_at_another_ones_block_now() -> None:
    """Two compute the same: who stores last uses the other's blocks, and its own ones go to others."""
    manager = cache()
    for name in ("c", "d"):
        manager.add_sequence(name, [9, 9, 9])
    tables = manager.tables.padded(["c", "d"])
    manager.store_context_blocks("c", 3)
    manager.tables.check(tables)
    assert manager.store_context_blocks("d", 3).replaced
    with pytest.raises(StaleTables, match="'d'"):
        manager.tables.check(tables)


def test_windows_that_slide_and_inputs_of_encoders_have_tables_too() -> None:
    """What a window lets go of makes its tables stale, and not those of the other; an input's last as long as it."""
    settings = {"max_attention_window": (2, 16), "primary_blocks": (12, 12, 6), "num_layers": 2}
    manager = KVCacheManager(
        strategies.config(**settings, cross_kv_cache_fraction=0.5, debug_check_tables=True)
    )
    manager.add_sequence("w", [8, 7, 6, 5, 4, 3], encoder_tokens=[1, 2, 3])
    manager.store_context_blocks("w", 3)
    short, long, cross = (manager.block_table("w", window) for window in (2, 16, CROSS_WINDOW))
    manager.store_context_blocks("w", 6)
    manager.tables.check(long, cross)
    with pytest.raises(StaleTables):
        manager.tables.check(short)
    manager.remove_sequence("w")
    with pytest.raises(StaleTables):
        manager.tables.check(cross)


def test_buffers_and_rows_of_tables_are_known() -> None:
    """A buffer that is used again stands for what was written last; tables of an admission come as a tuple."""
    manager = cache()
    for out in (np.zeros((2, 8), np.int32), torch.zeros((2, 8), dtype=torch.int32)):
        manager.tables.padded(["a", "b"], out=out)
        manager.tables.check(out)
        manager.add_tokens(["a"], [7, 8], [2])
        with pytest.raises(StaleTables):
            manager.tables.check(out)
        again = manager.tables.padded(["a", "b"], out=out)
        manager.tables.check(out, again)
    admission = manager.add_sequence("c", [5, 5, 5])
    manager.tables.check(manager.tables.paged(["a"]), admission.block_tables)


@pytest.mark.parametrize("table", [np.zeros(2, np.int32), torch.zeros(2, dtype=torch.int32), 5])
def test_what_was_not_given_out_is_refused(table: Any) -> None:
    """A copy on a device, or anything else, cannot be checked: the error says what can."""
    manager = cache()
    with pytest.raises(UsageError, match="not returned by this manager: pass tables as they were"):
        manager.tables.check(table)


def test_nothing_is_kept_of_tables_that_are_gone() -> None:
    """Tables are remembered as long as they live."""
    issued_tables = TableTracker({})
    tables = [np.zeros(2, np.int32) for _ in range(5)]
    issued_tables.note(tables, [], 0, of_step=False)
    assert len(issued_tables) == 5
    del tables
    gc.collect()
    assert len(issued_tables) == 0


def test_off_by_default() -> None:
    """Then nothing is looked at."""
    manager = cache(debug_check_tables=False)
    tables = manager.block_table("a")
    manager.remove_sequence("a")
    manager.tables.check(tables, object())  # type: ignore[arg-type]


def offloaded(wrap: Any, **settings: Any) -> KVCacheManager:
    """What "a" had computed lies in host memory, and is to be copied back for "c"."""
    config = strategies.config(primary_blocks=2, secondary_blocks=2, debug_check_tables=True, **settings)
    pools = Pools(Layout.of(config), "cpu")
    manager = KVCacheManager(config, pools=pools, copier=wrap(pools.copier()))
    for name, prompt in (("a", [0, 1, 2]), ("b", [1, 1, 1])):
        manager.add_sequence(name, prompt)
        ticket = manager.start_transfers()
        if ticket is not None:
            ticket.wait()
        manager.store_context_blocks(name, 3)
        manager.remove_sequence(name)
    manager.flush()
    assert manager.add_sequence("c", [0, 1, 5]).reused_tokens == 2
    return manager


@pytest.mark.parametrize("wait", [lambda ticket: ticket.wait(), lambda ticket: ticket.wait_on()])
def test_a_forward_pass_before_the_copies_are_started_or_done(wait: Callable[[Any], None]) -> None:
    """Tables that are at hand do not help: copies must have been started, and something must wait for them."""
    manager = offloaded(lambda copier: LateCopier(copier, 3))
    with pytest.raises(TransfersPending):
        manager.block_table("c")
    ticket = manager.start_transfers()
    tables = manager.tables.padded(["c"])
    with pytest.raises(TransfersNotAwaited, match="ticket"):
        manager.tables.check(tables)
    wait(ticket)
    manager.tables.check(tables)
    manager.remove_sequence("c")
    manager.add_sequence("d", [1, 1, 7])
    with pytest.raises(TransfersPending):
        manager.tables.check(manager.tables.padded([]))


@pytest.mark.parametrize("steps", [None, 3])
def test_a_dropped_ticket_is_found_however_quick_the_copies_are(steps: int | None) -> None:
    """On a CPU they are made at once, and on a GPU the same engine would read old bytes; `poll` is no waiting."""
    late: LateCopier | None = None

    def wrap(copier: Any) -> Any:
        nonlocal late
        late = None if steps is None else LateCopier(copier, steps)
        return late or copier

    manager = offloaded(wrap)
    manager.start_transfers()
    manager.poll()
    for _ in range(1 if late is None else 2):
        with pytest.raises(TransfersNotAwaited):
            manager.tables.check(manager.block_table("c"))
    if late is not None:
        for _ in range(3):
            late.tick()
        with pytest.raises(TransfersNotAwaited):
            manager.tables.check(manager.block_table("c"))
    # Once that was said, what is over harms nobody: a later step with a ticket of its own is right.
    manager.tables.check(manager.block_table("c"))


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_may_ask_the_ticket_itself(fails: bool) -> None:
    """Told by `done` that the copies are over, it need not wait for them."""
    manager = offloaded(
        (lambda copier: FailingCopier(copier, range(1, 9))) if fails else lambda copier: copier
    )
    ticket = manager.start_transfers()
    assert ticket is not None
    with pytest.raises(CopyFailed) if fails else nullcontext():
        assert ticket.done()
    manager.tables.check(manager.block_table("c"))


def test_tables_after_a_failed_copy() -> None:
    """Once `flush` has noticed it, what was lost is told instead of used."""
    manager = offloaded(lambda copier: FailingCopier(copier, range(1, 9)))
    manager.start_transfers()
    tables = manager.block_table("c")
    manager.flush()
    with pytest.raises((ComputationLost, StaleTables)):
        manager.tables.check(tables)
