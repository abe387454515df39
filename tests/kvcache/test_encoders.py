"""Encoder-decoder models: blocks of encoders' inputs, one situation at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.tokens.names import input_digests
from events.types import CROSS_WINDOW, AdmissionRefused, EncoderAdded, EncoderRemoved, Namespace
from kvcache.config import LogConfig
from kvcache.decide.lookup import lookup
from kvcache.errors import (
    InvalidTokens,
    KVCacheError,
    OutOfBlocks,
    PromptTooLong,
    TransfersPending,
    Unsupported,
    UsageError,
)
from kvcache.fold.state import CacheState
from kvcache.inputs import EncoderInput, Request
from kvcache.manager import KVCacheManager
from kvcache.replay import Replayed, replay
from tests.support.columns import pack_i32
from tests.support.engines import strategies
from tests.support.engines.lives import NoBytes
from tests.support.engines.simulated import LateCopier

PROMPT = [1, 2, 3, 4, 5]
READ = [7, 8, 9, 7, 8]
"""An input of two blocks and a half."""


def cache(**settings: Any) -> KVCacheManager:
    """Eight blocks of 2 tokens for sequences, six for what encoders read."""
    defaults: dict[str, Any] = {"primary_blocks": (8, 6), "cross_kv_cache_fraction": 0.5}
    return KVCacheManager(strategies.config(**(defaults | settings)))


def add(manager: KVCacheManager, name: str, read: Sequence[int] = READ, **more: Any) -> tuple[int, int]:
    """Admit a request and compute all of it; returns the tokens that it reuses, of its prompt and of its input."""
    admitted = manager.add_sequence(name, PROMPT, encoder_tokens=read, **more)
    manager.start_transfers()
    manager.store_encoder_blocks(name)
    manager.store_context_blocks(name, len(PROMPT))
    return admitted.reused_tokens, admitted.reused_encoder_tokens


def table(manager: KVCacheManager, name: str) -> list[int]:
    slots: list[int] = manager.block_table(name, CROSS_WINDOW).tolist()
    return slots


def test_an_equal_input_needs_no_blocks_and_no_encoder() -> None:
    """A running request and one that has ended serve the same input whole, its last block that is not full too."""
    manager = cache()
    assert add(manager, "a") == (0, 0)
    free = manager.num_free_blocks_per_window()[CROSS_WINDOW]
    assert add(manager, "b") == (4, 5)
    assert table(manager, "a") == table(manager, "b")
    manager.remove_sequence("a")
    manager.remove_sequence("b")
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == free + 3
    assert add(manager, "c") == (4, 5)
    assert manager.stats().encoder_tokens == 0  # not flushed
    manager.flush()
    stats = manager.stats()
    assert (stats.encoder_tokens, stats.reused_encoder_tokens) == (15, 10)
    counted = stats.windows[CROSS_WINDOW]
    assert (counted.blocks_reused_full, counted.blocks_missed, counted.blocks_allocated) == (6, 3, 3)


@pytest.mark.parametrize("other", [[7, 8, 9, 7], [7, 8, 9, 7, 8, 0], [7, 8, 9, 7, 9], [0, 8, 9, 7, 8]])
def test_inputs_that_differ_share_nothing(other: list[int]) -> None:
    """Not where they begin alike, since all depends on all of an input; nor do sequences with the same prompt."""
    manager = cache()
    add(manager, "a")
    assert add(manager, "b", other) == (0, 0)
    assert set(table(manager, "a")).isdisjoint(table(manager, "b"))
    assert manager.match(PROMPT, encoder_tokens=[*READ, 1]).reused_tokens == 0


@pytest.mark.parametrize("other", [{"lora_id": 1}, {"lora_name": "b"}, {"cache_salt": "b"}])
def test_namespaces_hold_for_inputs(other: dict[str, Any]) -> None:
    """What another adapter or tenant has computed is not reused."""
    manager = cache(primary_blocks=(8, 9))
    add(manager, "a")
    assert add(manager, "b", **other) == (0, 0)
    assert add(manager, "c", **other) == (4, 5)


def test_extra_ids_of_prompts_are_not_those_of_inputs() -> None:
    """Requests with and without extra ids share what the encoder has read, and no block of their prompts."""
    manager = cache()
    add(manager, "a")
    assert add(manager, "b", extra_ids=[0] * 5) == (0, 5)


def test_equal_inputs_side_by_side_are_kept_once() -> None:
    """Two requests that come before the encoder has run have blocks of their own; the second one's are given back."""
    manager = cache()
    manager.add_sequences([Request(name, PROMPT, encoder_tokens=READ) for name in "ab"])
    assert manager.store_encoder_blocks("a").replaced == []
    result = manager.store_encoder_blocks("b")
    assert [(each.block, each.window) for each in result.replaced] == [(0, 0), (1, 0), (2, 0)]
    assert result.stored_blocks == 3
    assert table(manager, "a") == table(manager, "b")
    assert manager.store_encoder_blocks("b").replaced == []
    manager.check()


def test_an_input_lost_in_part_is_reused_as_far_as_it_is_there() -> None:
    """Its last block was evicted: those before are taken as they are, and the encoder has to run."""
    manager = cache()
    add(manager, "a")
    manager.remove_sequence("a")
    add(manager, "b", [1] * 8)
    manager.remove_sequence("b")
    assert add(manager, "c") == (4, 4)
    manager.check()


def test_inputs_are_offloaded_and_brought_back() -> None:
    """In secondary they are found as well, and need copies, which must be started before anything is computed."""
    manager = cache(secondary_blocks=(0, 6))
    add(manager, "a")
    manager.remove_sequence("a")
    add(manager, "b", [1] * 12)
    manager.remove_sequence("b")
    demand = manager.scheduling.estimate_demand(Request("c", PROMPT, encoder_tokens=READ))
    assert (demand.reused_encoder_tokens, demand.reusable[CROSS_WINDOW], demand.held[CROSS_WINDOW]) == (
        5,
        3,
        0,
    )
    assert demand.needed[CROSS_WINDOW] == demand.to_completion[CROSS_WINDOW] == 3
    assert add(manager, "c") == (4, 5)
    manager.flush()
    assert manager.stats().windows[CROSS_WINDOW].blocks_onboarded == 3


def test_inputs_on_their_way_are_not_read() -> None:
    """Before their copies are started nothing can be computed from them, and nothing said to be."""
    manager = KVCacheManager(
        strategies.config(primary_blocks=(8, 6), secondary_blocks=(0, 6), cross_kv_cache_fraction=0.5),
        copier=LateCopier(NoBytes(), 2),
    )
    add(manager, "a")
    manager.remove_sequence("a")
    add(manager, "b", [1] * 12)
    manager.remove_sequence("b")
    assert manager.add_sequence("c", PROMPT, encoder_tokens=READ).reused_encoder_tokens == 5
    for call in (
        lambda: table(manager, "c"),
        lambda: manager.store_encoder_blocks("c"),
        lambda: manager.store_context_blocks("c", 5),
        lambda: manager.add_tokens(["c"], [1]),
    ):
        with pytest.raises(TransfersPending):
            call()
    manager.start_transfers()
    manager.add_tokens(["c"], [1])
    assert len(table(manager, "c")) == 3


def test_saying_again_that_the_encoder_has_run_changes_nothing() -> None:
    """Nor does it of an input that was reused whole."""
    manager = cache()
    add(manager, "a")
    manager.add_sequence("b", PROMPT, encoder_tokens=READ)
    events: list[object] = []
    manager.bus.subscribe(events.append)
    for name in "ab":
        assert manager.store_encoder_blocks(name).stored_blocks == 3
    assert events == []


def test_branches_read_what_their_parents_read() -> None:
    """A fork takes no blocks for it, a rewind leaves it alone, and it goes with the last that reads it."""
    manager = cache()
    ended: list[EncoderRemoved] = []
    manager.bus.subscribe(ended.append, EncoderRemoved)
    add(manager, "a")
    free = manager.num_free_blocks_per_window()[CROSS_WINDOW]
    manager.fork("a", "b")
    assert table(manager, "b") == table(manager, "a")
    manager.rewind("b", 2)
    assert len(table(manager, "b")) == 3
    assert manager.scheduling.simulate().remove("a")[CROSS_WINDOW] == 0
    manager.remove_sequence("a")
    assert (len(table(manager, "b")), ended) == (3, [])
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == free
    assert manager.scheduling.simulate().remove("b")[CROSS_WINDOW] == 3
    manager.remove_sequence("b")
    assert len(ended) == 1
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == free + 3
    manager.check()


def test_a_simulation_counts_an_input_with_its_last_reader() -> None:
    """Whoever of two branches is removed first gives nothing back, the other one all."""
    manager = cache()
    add(manager, "a")
    manager.fork("a", "b")
    simulation = manager.scheduling.simulate()
    assert [simulation.remove(name)[CROSS_WINDOW] for name in "ba"] == [0, 3]


def test_pins_hold_inputs() -> None:
    """What is pinned of a sequence could not be read without what its encoder has read."""
    manager = cache(max_pinned_share=1.0)
    add(manager, "a")
    pin = manager.pin("a")
    assert manager.pins()[pin].blocks == {16: 2, CROSS_WINDOW: 3}
    manager.remove_sequence("a")
    add(manager, "b", [1] * 6)
    with pytest.raises(OutOfBlocks, match=r"1 needed, 0 free or evictable in group 1 \(cross attention\)"):
        manager.add_sequence("c", [1], encoder_tokens=[2])
    manager.unpin(pin)
    manager.add_sequence("c", [1], encoder_tokens=[2])
    assert manager.pin("b", 6) == 2
    assert manager.pins()[2].blocks == {16: 0, CROSS_WINDOW: 0}


def test_clear_forgets_inputs() -> None:
    """What is read goes on being read, without a name, and is kept again when it ends."""
    manager = cache()
    add(manager, "a")
    manager.clear()
    assert manager.match(PROMPT, encoder_tokens=READ).encoder_blocks == ()
    assert len(table(manager, "a")) == 3
    manager.remove_sequence("a")
    assert manager.match(PROMPT, encoder_tokens=READ).reused_encoder_tokens == 5
    manager.check()


def test_what_was_not_computed_is_not_kept() -> None:
    """An input of which nobody said that the encoder has run is gone with its request."""
    manager = cache()
    manager.add_sequence("a", PROMPT, encoder_tokens=READ)
    manager.store_context_blocks("a", 5)
    manager.remove_sequence("a")
    assert manager.match(PROMPT, encoder_tokens=READ).reused_encoder_tokens == 0
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == 6


def test_without_reuse_inputs_are_shared_by_branches_only() -> None:
    """Equal inputs have blocks of their own, and nothing is left of them."""
    manager = cache(enable_block_reuse=False)
    add(manager, "a")
    assert add(manager, "b") == (0, 0)
    assert set(table(manager, "a")).isdisjoint(table(manager, "b"))
    manager.fork("a", "c")
    for name in "abc":
        manager.check()
        manager.remove_sequence(name)
    assert manager.num_free_blocks_per_window() == {16: 8, CROSS_WINDOW: 6}


def test_decoding_takes_nothing_for_cross_attention() -> None:
    """An input never grows, so only the windows count for what is to come."""
    manager = cache()
    add(manager, "a")
    add(manager, "b", [1] * 6)
    assert manager.num_free_blocks_per_window()[CROSS_WINDOW] == 0
    assert manager.num_free_blocks == 2
    manager.add_tokens(["a", "b"], [1, 1])
    manager.add_tokens(["a", "b"], [1, 1])
    assert len(table(manager, "a")) == 3
    assert manager.scheduling.next_step_blocks_per_window(
        "a"
    ) == manager.scheduling.remaining_blocks_per_window("a", 1)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, UsageError, "encoder_tokens is missing"),
        ({"encoder_tokens": []}, InvalidTokens, "the encoder input is empty"),
        (
            {"encoder_tokens": range(13)},
            PromptTooLong,
            "13 tokens exceed the limit of 12 .*in cross attention",
        ),
        (
            {"encoder_tokens": [0] * 13},
            PromptTooLong,
            "13 tokens exceed the limit of 12 .*in cross attention",
        ),
        ({"encoder_tokens": [55555, -1]}, InvalidTokens, "at position 1"),
        ({"encoder_tokens": "55555"}, InvalidTokens, "text or bytes"),
        ({"encoder_tokens": 55555}, InvalidTokens, "tokens"),
    ],
)
def test_wrong_inputs_are_refused(given: dict[str, Any], error: type[KVCacheError], says: str) -> None:
    """Nothing is left of the call, not even a note, and no message shows a token."""
    manager = cache()
    add(manager, "a")
    before, pending = manager.fingerprint(), list(manager.bus.pending)
    calls = (
        lambda: manager.add_sequence("b", [1], **given),
        lambda: manager.add_sequences([Request("c", [1], encoder_tokens=READ), Request("b", [1], **given)]),
        lambda: manager.can_add([Request("b", [1], **given)]),
        lambda: manager.scheduling.estimate_demand(Request("b", [1], **given)),
        lambda: manager.scheduling.find_in_flight(Request("b", [1], **given)),
        lambda: manager.match([1], **given),
        lambda: manager.count_reusable([1], **given),
    )
    for call in calls:
        with pytest.raises(error, match=says) as reported:
            call()
        assert "5555" not in str(reported.value)
    assert (manager.fingerprint(), list(manager.bus.pending)) == (before, pending)


def test_models_without_an_encoder_take_no_input() -> None:
    """Such a cache refuses inputs, and has no blocks for them."""
    manager = KVCacheManager(strategies.config())
    with pytest.raises(Unsupported, match="an encoder input in a cache without cross attention"):
        manager.add_sequence("a", [1], encoder_tokens=[1])
    manager.add_sequence("a", [1])
    with pytest.raises(UsageError, match="request 'a' has no encoder input"):
        manager.store_encoder_blocks("a")
    with pytest.raises(UsageError, match="no window of 0 tokens"):
        manager.block_table("a", CROSS_WINDOW)
    assert (manager.max_encoder_tokens, cache().max_encoder_tokens) == (0, 12)


@pytest.mark.parametrize(("prompt", "read"), [([1] * 12, [1]), ([1], [1] * 12)])
def test_a_batch_fits_whole_or_not_at_all(prompt: list[int], read: list[int]) -> None:
    """The second of two requests lacks blocks of a window, or of cross attention: neither is admitted."""
    manager = cache()
    requests = [Request("a", PROMPT, encoder_tokens=READ), Request("b", prompt, encoder_tokens=read)]
    assert manager.can_add(requests) == 1
    before, events = manager.fingerprint(), list[object]()
    manager.bus.subscribe(events.append)
    with pytest.raises(OutOfBlocks) as refused:
        manager.add_sequences(requests)
    assert (refused.value.index, len(refused.value.needed)) == (1, 2)
    assert manager.fingerprint() == before
    assert [type(event) for event in events] == [AdmissionRefused]
    manager.add_sequences(requests[:1])


def program(manager: KVCacheManager) -> dict[int, bytes]:
    """Something of all that can happen to inputs; returns the fingerprints as of each batch."""
    fingerprints: dict[int, bytes] = {}

    def flush() -> None:
        batch = manager.flush()
        assert batch is not None
        fingerprints[batch.seq] = manager.fingerprint()

    add(manager, "a")
    flush()
    add(manager, "b", cache_salt="s")
    manager.fork("a", "c")
    flush()
    pin = manager.pin("c")
    manager.remove_sequence("b")
    manager.remove_sequence("a")
    flush()
    manager.add_sequence("d", [1], encoder_tokens=[1] * 6)
    manager.start_transfers()
    flush()
    manager.unpin(pin)
    manager.remove_sequence("c")
    manager.remove_sequence("d", store=False)
    flush()
    add(manager, "e", [1] * 12)
    flush()
    return fingerprints


@pytest.mark.parametrize("record_tokens", [True, False])
@pytest.mark.parametrize("policy", ["lru", "levels"])
def test_logs_replay_at_each_batch(tmp_path: Path, record_tokens: bool, policy: str) -> None:
    """With and without tokens the log folds to what the manager had, and what is cached is found in it."""
    settings = strategies.config(
        primary_blocks=(8, 6),
        secondary_blocks=(4, 6),
        cross_kv_cache_fraction=0.5,
        eviction_policy=policy,
        log=LogConfig(fsync="never", overflow="block", record_tokens=record_tokens),
    )
    with KVCacheManager(settings, log=tmp_path) as manager:
        fingerprints = program(manager)
    replayed = Replayed(CacheState())
    for batch in LogReader(tmp_path):
        replayed.fold(batch, verify=True)
        replayed.state.check()
        assert replayed.fingerprint == fingerprints.get(batch.seq, replayed.fingerprint)
        assert replay(tmp_path, batch.seq).fingerprint == replayed.fingerprint
    assert len(fingerprints) == 6
    assert replayed.checkpoints_verified
    assert not replayed.checkpoints_failed
    packed = pack_i32([1] * 12)
    _, digest = input_digests(None, packed)
    encoder = EncoderInput(Namespace(None, None, digest), 12, packed)
    found = lookup(replayed.state, Namespace(), pack_i32([1]), encoder=encoder)
    assert found.reused_encoder_tokens == 12


def test_a_resumed_manager_goes_on_with_inputs(tmp_path: Path) -> None:
    """It knows who reads what, and finds what is cached."""
    settings = strategies.config(primary_blocks=(8, 6), cross_kv_cache_fraction=0.5)
    with KVCacheManager(settings, log=tmp_path) as manager:
        add(manager, "a")
        manager.fork("a", "b")
    resumed = KVCacheManager.resume(replay(tmp_path).state)
    resumed.check()
    assert resumed.fingerprint() == replay(tmp_path).fingerprint
    assert resumed.add_sequence("c", PROMPT, encoder_tokens=READ).reused_encoder_tokens == 5
    for name in "abc":
        resumed.remove_sequence(name)
        resumed.check()
    assert resumed.num_free_blocks_per_window()[CROSS_WINDOW] == 6


def test_records_of_requests_count_their_inputs() -> None:
    """What is allocated and reused for an input counts for the request that brought it."""
    manager = KVCacheManager(
        strategies.config(primary_blocks=(8, 6), cross_kv_cache_fraction=0.5), request_stats=9
    )
    add(manager, "a")
    add(manager, "b")
    manager.remove_sequence("a")
    manager.remove_sequence("b")
    first, second = manager.take_request_stats()
    assert (first.blocks_allocated, first.blocks_missed, first.blocks_reused_full) == (6, 6, 0)
    assert (second.blocks_allocated, second.blocks_missed, second.blocks_reused_full) == (1, 1, 5)


def test_events_report_inputs() -> None:
    """An input has a handle of its own, tokens to whole blocks, and a namespace apart from its sequence's."""
    manager = cache()
    events: list[EncoderAdded] = []
    manager.bus.subscribe(events.append, EncoderAdded)
    admitted = manager.add_sequence("a", PROMPT, encoder_tokens=READ)
    (event,) = events
    assert (event.sequence, event.handle) == (admitted.handle, admitted.handle + 1)
    assert (event.num_tokens, len(event.tokens), event.group) == (5, 24, 1)
    assert event.namespace != manager.state.sequences[admitted.handle].namespace
    assert len(admitted.block_tables) == 2
    assert len(admitted.block_tables[1]) == 3
