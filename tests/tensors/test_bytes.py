"""Bytes follow events: whatever the manager decides, blocks hold the K/V of their prefix once their copies landed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from events.types import BlocksCopied, BlocksMoved, MoveReason, Namespace
from kvcache.errors import TransfersPending
from kvcache.inputs import Request
from kvcache.manager import KVCacheManager
from tests.support.engines import strategies
from tests.support.engines.byte_engine import Driver, Wrap, at_once, failing, late, late_and_failing
from tests.support.engines.fake_engine import FakeEngine, expected
from tests.support.engines.inside import sequence_of
from tests.support.seeds import seeds


@pytest.mark.parametrize("seed", seeds(range(20), quick=6))
def test_bytes_follow_events(seed: int) -> None:
    """After any commands, with copies at once or late, each cached block and each sequence has its own K/V."""
    Driver(seed, (at_once, late)[seed % 2], trusted=True).run(60)


@pytest.mark.parametrize("seed", seeds(range(20), quick=6))
def test_bytes_of_cross_attention_follow_events(seed: int) -> None:
    """The same where an encoder reads something for each sequence, of which every byte counts."""
    Driver(seed, (at_once, late)[seed % 2], trusted=True, encoder=True).run(60)
    Driver(seed, late_and_failing(seed), trusted=False, encoder=True).run(90)


@pytest.mark.parametrize("seed", seeds(range(20), quick=6))
def test_who_reads_what_was_written_reads_no_blank_fill(seed: int) -> None:
    """The same with new blocks overwritten: no copy and no sequence sees anything of that."""
    Driver(seed, (at_once, late)[seed % 2], trusted=True, fill_blank=True).run(60)
    Driver(seed, late_and_failing(seed), trusted=False, fill_blank=True).run(60)


def run_failing(seeds: range) -> None:
    for seed in seeds:
        try:
            Driver(seed, (failing if seed % 8 == 0 else late_and_failing)(seed), trusted=False).run(120)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("first", seeds(range(0, 300, 10), quick=6))
def test_failed_copies_are_never_served(first: int) -> None:
    """After any commands with copies late and failing, what is cached or said to be computed is right."""
    run_failing(range(first, first + 10))


@pytest.mark.parametrize("seed", [37254, 45340])
def test_a_path_that_grows_after_its_window_has_left_it(seed: int) -> None:
    """The place of the last block that a window has left says nothing of the blocks that were reused after it."""
    run_failing(range(seed, seed + 1))


def test_superseded_blocks_of_both_levels() -> None:
    """In this program a stored block makes two shorter ones useless, one in secondary and one in primary."""
    run_failing(range(6322, 6323))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 51_000, 1000))
def test_failed_copies_are_never_served_for_long(first: int) -> None:
    """The same for 50,000 seeds."""
    run_failing(range(first, first + 1000))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 600))
def test_bytes_follow_events_for_long(seed: int) -> None:
    """The same for many more commands, in every mode."""
    Driver(seed, (at_once, late)[seed % 2], trusted=True).run(300)
    Driver(seed, (failing, late_and_failing)[seed % 2](seed), trusted=False).run(300)


def test_driver_reaches_what_matters() -> None:
    """The random commands above lead to offloads, onboards, copies from both levels, and copies that fail.

    These also fail while sequences have let go of blocks, and all goes on without these.
    """
    seen, failed, given_up = set(), 0, 0
    for seed in range(50):
        driver = Driver(seed, late_and_failing(seed), trusted=False)
        driver.engine.manager.bus.subscribe(
            lambda event: seen.add(event.why if isinstance(event, BlocksMoved) else event.source_level),
            BlocksMoved,
            BlocksCopied,
        )
        driver.run(60)
        failed += len(driver.engine.failed)
        given_up += len(driver.engine.given_up)
    assert seen == {*MoveReason, 0, 1}
    assert failed
    assert given_up


# -- single cases


def test_duplicate_blocks_are_swapped_with_their_bytes() -> None:
    """Two requests compute one prefix side by side; the second is pointed at the first one's right blocks."""
    engine = FakeEngine()
    prompt = [0, 1, 0, 1, 1]
    engine.admit(Request("a", prompt), Request("b", prompt))
    engine.forward("a", 4)
    engine.write("b", 4)
    result = engine.manager.store_context_blocks("b", 4)
    assert [each.block for each in result.replaced] == [0, 1]
    tables = engine.manager.block_tables(["a", "b"])
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    assert tables[0, 2] != tables[1, 2]
    engine.verify()
    engine.verify_running()


def fill(engine: FakeEngine, request_id: str, prompt: list[int]) -> None:
    """Run a request to its end, all computed."""
    engine.admit(Request(request_id, prompt))
    engine.forward(request_id)
    engine.end(request_id)


@pytest.mark.parametrize("secondary", [0, 4])
def test_source_evicted_by_the_call_that_copies_from_it(secondary: int) -> None:
    """The only evictable block is the source of a partial copy: it is evicted, and still copied before it is lost."""
    engine = FakeEngine(wrap=late, tokens_per_block=4, primary_blocks=2, secondary_blocks=secondary)
    fill(engine, "a", [0, 1, 0, 1, 1])
    events: list[object] = []
    engine.manager.bus.subscribe(events.append)
    (admitted,) = engine.admit(Request("b", [0, 1, 0, 0, 1, 1]))
    assert admitted.reused_partial == 3
    (copied,) = [event for event in events if isinstance(event, BlocksCopied)]
    assert copied.source_level == 0
    engine.verify_running()
    engine.settle()
    engine.verify()
    engine.verify_running()
    assert engine.manager.count_reusable([0, 1, 0, 1, 1]) == (1 if secondary else 0)


def test_two_requests_share_a_source_that_is_evicted() -> None:
    """Both copy the start of one block although its slot becomes the first one's own."""
    engine = FakeEngine(wrap=late, tokens_per_block=4, primary_blocks=2, secondary_blocks=0)
    fill(engine, "a", [0, 1, 0, 1, 1])
    engine.admit(Request("b", [0, 1, 1, 1]), Request("c", [0, 1, 0, 0]))
    engine.verify_running()
    engine.forward("b")
    engine.forward("c")
    engine.verify_running()


def offloaded_prefix(wrap: Wrap = at_once) -> FakeEngine:
    """A prefix of two blocks in secondary, nothing in primary."""
    engine = FakeEngine(wrap=wrap, primary_blocks=6, secondary_blocks=6)
    fill(engine, "a", [0, 1, 0, 1, 1])
    fill(engine, "filler", [1] * 12)
    assert [block.level for block in engine.manager.match([0, 1, 0, 1, 1]).blocks] == [1, 1]
    engine.settle()
    return engine


def test_requests_of_a_batch_share_an_onboarded_prefix() -> None:
    """A prefix in secondary that two requests of a batch begin with is brought back once, into both block tables."""
    engine = offloaded_prefix(late)
    events: list[object] = []
    engine.manager.bus.subscribe(events.append)
    admitted = engine.admit(
        Request("b", [0, 1, 0, 1, 0]), Request("c", [0, 1, 0, 1, 1]), Request("d", [0, 1, 1])
    )
    assert [each.reused_secondary for each in admitted] == [4, 4, 2]
    onboarded = [
        len(event.to_slots) // 4
        for event in events
        if isinstance(event, BlocksMoved) and event.why == MoveReason.ONBOARD
    ]
    assert sum(onboarded) == 2
    engine.start_transfers()
    tables = engine.manager.block_tables(["b", "c", "d"])
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    assert tables[0, 0] == tables[2, 0]
    engine.verify_running()
    engine.settle()
    engine.verify()


def test_computing_what_lies_in_secondary_needs_no_copy() -> None:
    """A block computed while it lies in secondary moves to the computing sequence's slot, with its new bytes."""
    engine = FakeEngine(primary_blocks=6, secondary_blocks=6)
    engine.admit(Request("b", [0, 1, 1]))
    fill(engine, "a", [0, 1, 1])
    fill(engine, "filler", [1] * 8)
    assert engine.manager.match([0, 1, 1]).blocks[0].level == 1
    engine.settle()
    events: list[object] = []
    engine.manager.bus.subscribe(events.append)
    engine.forward("b")
    assert [event.why for event in events if isinstance(event, BlocksMoved)] == [MoveReason.RECOMPUTED]
    assert engine.manager.match([0, 1, 1]).blocks[0].level == 0
    assert engine.manager.start_transfers() is None
    engine.verify()
    engine.verify_running()


def test_block_tables_are_tensors() -> None:
    """With pools the tables are int32 tensors on the host, padded with -1, that index the pools as they are."""
    engine = FakeEngine()
    [a, _] = engine.admit(Request("a", [1, 2, 3]), Request("b", [4]))
    engine.forward("a")
    table, tables = engine.manager.block_table("a"), engine.manager.block_tables(["a", "b"])
    assert isinstance(table, torch.Tensor)
    assert isinstance(tables, torch.Tensor)
    assert (table.dtype, table.device.type, table.shape) == (torch.int32, "cpu", (2,))
    assert (tables.dtype, tables.device.type, tables.shape) == (torch.int32, "cpu", (2, 2))
    assert tables.tolist() == [table.tolist(), [*engine.manager.block_table("b"), -1]]
    assert a.block_tables[0].tolist() == table.tolist()
    written = engine.pools.layer(0)[table, 0].flatten()[:3].tolist()
    assert written == expected([1, 2, 3], Namespace())
    before = engine.manager.fingerprint()
    tables[:] = 99
    table[:] = 99
    assert engine.manager.fingerprint() == before
    assert engine.manager.block_tables([]).shape == (0, 0)


def test_block_tables_wait_for_their_copies() -> None:
    """Between an admission that copies and `start_transfers`, no block table is handed out."""
    engine = offloaded_prefix()
    (admitted,) = engine.admit(Request("b", [0, 1, 0, 1, 0]))
    with pytest.raises(TransfersPending):
        engine.manager.block_table("b")
    with pytest.raises(TransfersPending):
        _ = admitted.block_tables
    with pytest.raises(TransfersPending):
        engine.manager.block_tables(["b"])
    engine.start_transfers()
    assert len(engine.manager.block_table("b")) == 3


REPORTS: list[Callable[[KVCacheManager, str], object]] = [
    lambda manager, name: manager.add_tokens([name], [1]),
    lambda manager, name: manager.add_tokens([name], [1, 1], [2]),
    lambda manager, name: manager.store_context_blocks(name, 3),
]


def refuses_reports(manager: KVCacheManager, name: str) -> bool:
    """Whether all reports of what was computed are refused for the sequence, without a trace, or none is."""
    before, events, refused = manager.fingerprint(), len(manager.bus.pending), 0
    for report in REPORTS:
        try:
            report(manager, name)
        except TransfersPending:
            refused += 1
            assert (manager.fingerprint(), len(manager.bus.pending)) == (before, events)
    assert refused in (0, len(REPORTS))
    return refused > 0


def test_nothing_is_computed_before_its_copies_are_started() -> None:
    """Who waits for copies cannot have computed, also not who found the blocks when they were on their way already."""
    engine = offloaded_prefix(late)
    manager = engine.manager
    engine.admit(Request("running", [1, 0]))
    engine.forward("running")
    engine.admit(Request("b", [0, 1, 0, 1, 0]))
    (late_one,) = engine.admit(Request("c", [0, 1, 1]))
    assert late_one.reused_primary == 2
    assert refuses_reports(manager, "b")
    assert refuses_reports(manager, "c")
    with pytest.raises(TransfersPending):
        manager.add_tokens(["running", "c"], [1, 1])
    engine.start_transfers()
    for name in ("b", "c"):
        engine.forward(name)
        engine.decode([name], [1])
    engine.settle()
    engine.verify()


def test_who_waits_for_nothing_goes_on() -> None:
    """While copies of others are pending a running sequence decodes, and a waiting one may end."""
    engine = offloaded_prefix(late)
    manager = engine.manager
    engine.admit(Request("running", [1, 0]))
    engine.forward("running")
    engine.admit(Request("b", [0, 1, 0, 1, 0]))
    assert manager.transfers is not None
    assert manager.transfers.pending
    assert not refuses_reports(manager, "running")
    engine.end("b")
    manager.check()
    engine.settle()


def test_a_copied_start_of_a_block_is_waited_for_as_well() -> None:
    """What continues a copied block was not computed before the copy; what had to make room for it may go on."""
    engine = FakeEngine(primary_blocks=6, secondary_blocks=6, tokens_per_block=4)
    fill(engine, "a", [0, 1, 0, 1, 1])
    (admitted,) = engine.admit(Request("b", [0, 1, 1, 1]))
    assert (admitted.reused_tokens, admitted.reused_partial) == (2, 2)
    assert refuses_reports(engine.manager, "b")
    engine.forward("b")
    engine.settle()
    engine.admit(Request("c", [1] * 16))
    engine.forward("c")
    engine.settle()
    engine.manager.add_tokens(["b"], [1])
    assert engine.manager.transfers is not None
    assert engine.manager.transfers.pending  # a block of "a" is offloaded
    assert not refuses_reports(engine.manager, "b")


def test_blocks_land_when_their_bytes_have() -> None:
    """A block on its way is matched at once, and said to have landed only after the copy's end was seen."""
    engine = offloaded_prefix(late)
    engine.admit(Request("b", [0, 1, 0, 1, 0]))
    assert not any(block.landed for block in engine.manager.match([0, 1, 0, 1, 1]).blocks)
    engine.settle()
    assert all(block.landed for block in engine.manager.match([0, 1, 0, 1, 1]).blocks)


def test_closing_lands_what_is_in_flight() -> None:
    """Closing starts and awaits all copies, so the last state has none on their way."""
    engine = offloaded_prefix(late)
    engine.admit(Request("b", [0, 1, 0, 1, 0]))
    engine.manager.close()
    assert not engine.manager.state.transfers
    assert strategies.cached_blocks(engine.manager.state)
    assert len(engine.manager.state.sequences) == 1


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("wrap", [at_once, late], ids=["at once", "late"])
def test_branches_read_their_own(wrap: Wrap, reuse: bool) -> None:
    """Each branch finds what its parent had computed, and goes on by itself; so do branches of branches."""
    engine = FakeEngine(
        wrap=wrap,
        tokens_per_block=4,
        primary_blocks=24,
        enable_block_reuse=reuse,
        max_attention_window=(6, 24),
        num_layers=2,
    )
    engine.admit(Request("a", [1, 2, 3, 4, 5, 6]))
    engine.forward("a", 5)
    engine.fork("a", "before its prompt was computed")
    engine.forward("a")
    engine.fork("a", "b")
    engine.decode(["a", "b"], [7, 8])
    engine.fork("b", "c")
    running = list(engine.running)
    for token in range(8):
        engine.decode(running, [token + number for number in range(len(running))])
        engine.verify_running()
        engine.verify()
    for name in ("a", "c", "b", "before its prompt was computed"):
        engine.end(name)
        engine.verify_running()
    engine.settle()
    engine.verify()
    assert engine.manager.num_free_blocks == 24


@pytest.mark.parametrize("windows", [(64,), (6, 64)], ids=["full", "sliding"])
@pytest.mark.parametrize("prompt", range(3, 8))
def test_beams_branch_when_their_last_token_is_scored(prompt: int, windows: tuple[int, ...]) -> None:
    """As in the example: compute, branch, start copies, append. Each reads its own K/V, and so do later prompts."""
    engine = FakeEngine(
        tokens_per_block=4,
        primary_blocks=48,
        max_sequence_length=64,
        max_attention_window=windows,
        num_layers=len(windows),
        debug_fill_blank=True,
    )
    manager, beams = engine.manager, ["0"]
    engine.admit(Request("0", list(range(prompt))))
    for step in range(9):
        for beam in beams:
            engine.write(beam, sequence_of(manager, beam).num_tokens)
        child, gone = str(step + 1), beams[0] if len(beams) == 3 else None
        engine.fork(beams[-1], child)
        if gone is not None:
            engine.end(gone, store=False)
        beams = [*beams[gone is not None :], child]
        engine.start_transfers()
        manager.add_tokens(beams, [20 + number for number in range(len(beams))])
        engine.verify_running()
        engine.verify()
    for beam in beams:
        tokens = sequence_of(manager, beam).tokens.tolist()
        engine.end(beam)
        (again,) = engine.admit(Request(f"{beam} again", tokens))
        assert again.reused_tokens == len(tokens) - 1
        engine.start_transfers()
        assert engine.finds(f"{beam} again", again.reused_tokens)


@pytest.mark.parametrize("computed", ["prompt", "drafts"])
def test_a_branch_has_what_nobody_was_reported_of(computed: str) -> None:
    """A whole prompt, or drafts over several blocks, are computed and not reported when a sequence branches."""
    engine = FakeEngine(tokens_per_block=4, primary_blocks=24)
    engine.admit(Request("a", list(range(1, 12))))
    if computed == "drafts":
        engine.decode(["a"], [20])
        engine.manager.add_tokens(["a"], [21, 22, 23, 24, 25, 26], [6], draft=True)
    engine.write("a", sequence_of(engine.manager, "a").num_tokens)
    engine.fork("a", "b")
    engine.start_transfers()
    engine.manager.add_tokens(["a", "b"], [7, 8])
    engine.verify()
    engine.verify_running()


@pytest.mark.parametrize("left", range(4, 10))
def test_the_last_token_that_is_left_keeps_its_kv(left: int) -> None:
    """After a rewind into a cached block the next token may come at once: nothing is computed anew."""
    engine = FakeEngine(tokens_per_block=4, primary_blocks=8, debug_fill_blank=True)
    engine.admit(Request("a", list(range(1, 12))))
    engine.forward("a")
    engine.rewind("a", left)
    engine.start_transfers()
    engine.manager.add_tokens(["a"], [30])
    engine.verify_running()
    engine.decode(["a"], [31])
    engine.verify()


@pytest.mark.parametrize("wrap", [at_once, late], ids=["at once", "late"])
def test_who_goes_back_leaves_what_is_cached_as_it_is(wrap: Wrap) -> None:
    """Tokens are taken back into a cached block and others appended: each reads its own, and so do later prompts."""
    engine = FakeEngine(wrap=wrap, tokens_per_block=4, primary_blocks=12, secondary_blocks=4)
    tokens = list(range(1, 14))
    engine.admit(Request("a", tokens))
    engine.forward("a")
    engine.decode(["a"], [20])
    for left, token in ((11, 30), (6, 40), (5, 50), (1, 60)):
        engine.rewind("a", left)
        for more in range(5):
            engine.decode(["a"], [token + more])
            engine.verify_running()
            engine.verify()
    assert engine.manager.count_reusable(tokens) == 3
    engine.end("a")
    engine.admit(Request("b", tokens))
    engine.forward("b")
    engine.verify_running()
