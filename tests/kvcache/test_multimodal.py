"""Multimodal items and extra ids: what is shared, what is refused, and what the log tells of them."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from events.feed.changes import Cleared, Removed, Stored
from events.feed.fold import Feed
from events.formats.vllm import BlockStored, decode_batch, encode_batch
from events.log import LogReader
from events.tokens import symbols
from events.types import Event, EventBatch, SequenceAdded, StateExported, SymbolsForgotten, SymbolsInterned
from kvcache import KVCacheManager, MultimodalItem, Request
from kvcache.decide.lookup import lookup
from kvcache.errors import (
    InvalidTokens,
    InvariantViolated,
    OutOfBlocks,
    OutOfSymbols,
    Unsupported,
    UsageError,
)
from kvcache.fold.state import CacheState
from kvcache.inputs import namespace_of, rich_tokens
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.inside import sequence_of
from tests.support.logs.kept import states_of
from tests.support.logs.logs import frames_of

H1, H2 = b"\x11" * 32, b"\x22" * 32


def cache(log: Path | None = None, **settings: Any) -> KVCacheManager:
    defaults = {"tokens_per_block": 4, "primary_blocks": 16, "max_sequence_length": 64}
    if "log_settings" in settings:
        settings["log"] = settings.pop("log_settings")
    return KVCacheManager(strategies.config(**(defaults | settings)), log=log)


def served(manager: KVCacheManager, tokens: Sequence[int], **options: Any) -> tuple[int, list[int]]:
    """Run a request to its end; what it reused, and its block table."""
    admitted = manager.add_sequence("r", tokens, **options)
    table = admitted.block_tables[0].tolist()
    manager.store_context_blocks("r", len(tokens))
    manager.remove_sequence("r")
    manager.check()
    return admitted.reused_tokens, table


def received(manager: KVCacheManager) -> list[Event]:
    """The events from here on."""
    events: list[Event] = []
    manager.bus.subscribe(events.append)
    return events


# -- TensorRT-LLM's scenarios


def test_reuse_with_multimodal_hash() -> None:
    """TensorRT-LLM's BlockManagerReuseWithMultimodalHash: blocks are shared as far as tokens and items agree."""
    manager, prompt = cache(enable_partial_reuse=False), list(range(100, 109))
    assert served(manager, prompt, multimodal=[MultimodalItem(H1, 2, 4)]) == (0, [0, 1, 2])
    assert served(manager, prompt, multimodal=[MultimodalItem(H1, 2, 4)])[0] == 8
    assert served(manager, prompt, multimodal=[MultimodalItem(H2, 2, 4)])[0] == 0
    reused, table = served(manager, prompt, multimodal=[MultimodalItem(H1, 2, 2), MultimodalItem(H2, 4, 2)])
    assert (reused, table[0]) == (4, 0)
    assert served(manager, prompt)[0] == 0


def test_text_before_another_item_is_copied() -> None:
    """Unlike TensorRT-LLM, which then copies nothing: the tokens before the item are the same, hence of use."""
    manager, prompt = cache(), list(range(100, 109))
    served(manager, prompt, multimodal=[MultimodalItem(H1, 2, 4)])
    assert served(manager, prompt, multimodal=[MultimodalItem(H2, 2, 4)])[0] == 2
    assert served(manager, prompt)[0] == 2
    assert served(manager, prompt, multimodal=[MultimodalItem(H1, 2, 1)])[0] == 3


def test_reuse_with_extra_ids() -> None:
    """TensorRT-LLM's BlockManagerReuseWithExtraId: sampled tokens go on with extra id 0."""
    manager = cache()
    prompt, extra_ids = [100, 101, 102, 103, 104, 105, 0, 1, 2], [1, 1, 2, 2, 3, 3, 0, 0, 0]
    for reused in (0, 8):
        admitted = manager.add_sequence("r", prompt, extra_ids=extra_ids)
        assert admitted.reused_tokens == reused
        manager.store_context_blocks("r", len(prompt))
        manager.add_tokens(["r"], [3])
        manager.add_tokens(["r"], [4])
        manager.remove_sequence("r")
    longer = manager.match([*prompt, 3, 4], extra_ids=[*extra_ids, 0, 0])
    assert longer.reused_tokens == 10
    assert served(manager, prompt, extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0])[0] == 0
    assert served(manager, prompt, extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0])[0] == 4


def test_requests_with_extra_ids_share_nothing_with_those_without() -> None:
    """As in TensorRT-LLM, that a request uses extra ids is part of equality, even if all of them are 0."""
    manager, prompt = cache(), list(range(9))
    served(manager, prompt)
    assert served(manager, prompt, extra_ids=[0] * 9)[0] == 0
    assert served(manager, prompt, extra_ids=[0] * 9)[0] == 8
    assert manager.state.symbols.pages == {}


def test_extra_ids_and_items_decide_together() -> None:
    """A token of an item with an extra id is another one than with another id, or outside of the item."""
    manager, item = cache(), MultimodalItem(H1, 0, 4)
    assert served(manager, [7] * 9, extra_ids=[1] * 9, multimodal=[item])[0] == 0
    assert served(manager, [7] * 9, extra_ids=[1] * 9, multimodal=[item])[0] == 8
    assert served(manager, [7] * 9, extra_ids=[2] * 9, multimodal=[item])[0] == 0
    assert served(manager, [7] * 9, extra_ids=[1] * 9)[0] == 0


def test_an_items_beginning_is_shared_whatever_follows() -> None:
    """A prompt that ends inside an item shares the blocks with one that holds all of it."""
    manager = cache()
    served(manager, [7] * 20, multimodal=[MultimodalItem(H1, 0, 20)])
    assert served(manager, [*[7] * 10, 1, 2, 3], multimodal=[MultimodalItem(H1, 0, 10)])[0] == 10


def test_batches_share_their_new_symbols() -> None:
    """Two requests of a batch with one item get its symbols once, and share its blocks when they are stored."""
    manager = cache()
    events = received(manager)
    item = MultimodalItem(H1, 0, 8)
    manager.add_sequences([Request(number, [7] * 9, multimodal=[item]) for number in range(2)])
    assert [len(e.pages) for e in events if isinstance(e, SymbolsInterned)] == [1]
    manager.store_context_blocks(0, 9)
    assert manager.store_context_blocks(1, 9).replaced
    manager.check()


# -- refusals


GOOD = MultimodalItem(H1, 2, 4)
BAD_ITEMS: list[Any] = [
    3,
    "no list of items",
    [H1],
    [(H1, 2, 4)],
    [MultimodalItem(H1[1:], 0, 1)],
    [MultimodalItem(H1.hex(), 0, 1)],  # type: ignore[arg-type]
    [MultimodalItem(H1, -1, 2)],
    [MultimodalItem(H1, 0, 0)],
    [MultimodalItem(H1, 8, 2)],
    [MultimodalItem(H1, 2.0, 1)],  # type: ignore[arg-type]
    [MultimodalItem(H1, 0, True)],
    [MultimodalItem(H1, 0, 1, 5)],  # type: ignore[arg-type]
    [MultimodalItem(H1, 0, 1, "\ud800")],
    [GOOD, MultimodalItem(H2, 5, 1)],
    [MultimodalItem(H2, 0, 3, "a"), MultimodalItem(H1, 0, 3)],
]
BAD_IDS: list[Any] = [
    "123456789",
    bytes(9),
    5,
    [1] * 8,
    [1] * 10,
    [1] * 8 + [-1],
    [1] * 8 + [2**64],
    [1] * 8 + [1.0],
    [1] * 8 + [None],
    [1] * 8 + [True],
    (False, *[0] * 8),
    np.array([1.0] * 9),
    np.array([[1] * 9] * 9),
    np.array([-7] * 9),
    dict.fromkeys(range(9)),
]


@pytest.mark.parametrize("multimodal", BAD_ITEMS, ids=repr)
def test_wrong_items_are_refused(multimodal: Any) -> None:
    """They raise a `UsageError` from each call that takes them, and change nothing."""
    manager = cache()
    before, events = manager.fingerprint(), received(manager)
    for call in (
        lambda: manager.add_sequence("r", [1] * 9, multimodal=multimodal),
        lambda: manager.can_add([Request("r", [1] * 9, multimodal=multimodal)]),
        lambda: manager.match([1] * 9, multimodal=multimodal),
    ):
        with pytest.raises(UsageError):
            call()
    assert (manager.fingerprint(), events) == (before, [])


@pytest.mark.parametrize("extra_ids", BAD_IDS, ids=repr)
def test_wrong_extra_ids_are_refused(extra_ids: Any) -> None:
    """They raise `InvalidTokens` that quotes none of them, and change nothing."""
    manager = cache()
    before, events = manager.fingerprint(), received(manager)
    for call in (
        lambda: manager.add_sequence("r", [1] * 9, extra_ids=extra_ids),
        lambda: manager.count_reusable([1] * 9, extra_ids=extra_ids),
    ):
        with pytest.raises(InvalidTokens) as raised:
            call()
        assert "7" not in str(raised.value)
    assert (manager.fingerprint(), events) == (before, [])


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda ids: array("q", ids), lambda ids: np.array(ids, np.uint8)]
)
def test_extra_ids_may_be_any_row_of_integers(kind: Any) -> None:
    """Lists, tuples, arrays and numpy arrays of any integers mean the same."""
    rich = rich_tokens(bytes(12), (), kind([1, 0, 255]))
    assert rich is not None
    assert rich.extra_ids is not None
    assert rich.extra_ids.tolist() == [1, 0, 255]
    assert rich.extra_ids.dtype == np.uint64


def test_items_may_come_in_any_order() -> None:
    """They are put in order by their positions."""
    rich = rich_tokens(bytes(36), iter([MultimodalItem(H2, 6, 1, "dog"), GOOD]), None)
    assert rich is not None
    assert [(span.begin, span.end, span.uuid) for span in rich.items] == [(2, 6, None), (6, 7, "dog")]


def test_refused_admissions_intern_nothing() -> None:
    """What does not fit leaves no symbols behind, and neither does a lookup."""
    manager = cache(primary_blocks=4)
    events = received(manager)
    manager.add_sequence("a", [1] * 9)
    known = len(events)
    options: dict[str, Any] = {"multimodal": [GOOD], "extra_ids": [5] * 9}
    with pytest.raises(OutOfBlocks):
        manager.add_sequence("b", [2] * 9, **options)
    assert manager.can_add([Request("b", [2] * 9, **options)]) == 0
    assert manager.match([2] * 9, **options).reused_tokens == 0
    assert manager.count_reusable([2] * 9, **options) == 0
    assert manager.state.symbols.pages == {}
    assert not [event for event in events[known:] if isinstance(event, SymbolsInterned)]


def test_symbols_can_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt for which no pages are left is refused before anything happens, and the manager goes on."""
    monkeypatch.setattr(symbols, "MAX_PAGES", 3)
    manager = cache()
    served(manager, [1, 2], multimodal=[MultimodalItem(H1, 0, 2)])
    before, events = manager.fingerprint(), received(manager)
    with pytest.raises(OutOfSymbols) as raised:
        manager.add_sequence("r", [1, 2], multimodal=[MultimodalItem(H2, 0, 2)])
    assert (raised.value.needed, raised.value.available) == (2, 1)
    assert (manager.fingerprint(), events) == (before, [])
    assert served(manager, [1, 2], multimodal=[MultimodalItem(H2, 0, 1)])[0] == 0


# -- forgetting


def images(manager: KVCacheManager, numbers: Sequence[int]) -> None:
    """Serve requests of 8 tokens of an image each."""
    for number in numbers:
        served(manager, [7] * 9, multimodal=[MultimodalItem(bytes([number]) * 32, 0, 8)])
        manager.flush()


def test_the_table_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many images come, only about as many pages are kept as cached blocks and running sequences use."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 8)
    manager = cache()
    events = received(manager)
    manager.add_sequence("long", [9] * 9, multimodal=[MultimodalItem(H1, 0, 9)])
    long_symbols = sequence_of(manager, "long").tokens.tolist()
    images(manager, range(100, 200))
    assert len(manager.state.symbols.pages) <= 16
    assert max(manager.state.symbols.pages) <= 16
    assert [event for event in events if isinstance(event, SymbolsForgotten)]
    assert (
        manager.state.symbols.symbols_of(
            rich_tokens(array("i", [9] * 9).tobytes(), [MultimodalItem(H1, 0, 9)], None)  # type: ignore[arg-type]
        )
        == array("i", long_symbols).tobytes()
    )
    # What is still cached is found by the image, though numbers have come to stand for others.
    found = [
        manager.match([7] * 9, multimodal=[MultimodalItem(bytes([number]) * 32, 0, 8)])
        for number in range(100, 200)
    ]
    assert found[-1].reused_tokens == 8
    assert found[0].reused_tokens == 0
    manager.check()


def test_nothing_to_forget_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all pages are in use, they are looked through again only when there are twice as many."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 2)
    manager = cache()
    events = received(manager)
    item = MultimodalItem(H1, 0, 6)
    manager.add_sequence("r", range_of(9), multimodal=[item])
    for _ in range(3):
        manager.flush()
    assert [event for event in events if isinstance(event, SymbolsForgotten)] == [SymbolsForgotten(b"")]
    assert manager.state.symbols.forget_at == 12


def range_of(count: int) -> list[int]:
    return list(range(100, 100 + count))


def test_check_finds_symbols_that_stand_for_nothing() -> None:
    """A state whose table lacks a page in use, or which has noted a sequence wrongly, breaks a law."""
    manager = cache()
    manager.add_sequence("r", [1, 2], multimodal=[MultimodalItem(H1, 0, 1)])
    manager.check()
    exported = manager.state.export()
    broken = CacheState()
    assert manager.state.created is not None
    broken.apply(manager.state.created)
    with pytest.raises(InvariantViolated, match="have no meaning"):
        broken.apply(StateExported(exported.groups, exported.sequences, (), 2, 1, 0, 0))


# -- the log


class Traffic:
    """A fixed course of requests with and without items and extra ids, flushed after each."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.fingerprints: dict[int, bytes] = {}

    def flush(self) -> None:
        batch = self.manager.flush()
        if batch is not None:
            self.fingerprints[batch.seq] = self.manager.fingerprint()

    def run(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            options: dict[str, Any] = {}
            if number % 3:
                options["multimodal"] = [MultimodalItem(bytes([number % 7]) * 32, 1, 5, f"image-{number}")]
            if number % 4 == 0:
                options["extra_ids"] = [number % 5, 0] * 5
            self.manager.add_sequence(number, [1, *[7] * 5, 2, 3, number % 2, 4], **options)
            self.flush()
            self.manager.store_context_blocks(number, 10)
            for token in range(4):
                self.manager.add_tokens([number], [token])
            self.flush()
            if number % 5:
                self.manager.remove_sequence(number)
            elif number:
                self.manager.remove_sequence(number - 5)
                self.manager.add_tokens([number], [9])
            self.flush()
            if number in (0, 1):
                self.manager.check()


@pytest.mark.parametrize(
    ("algorithm", "tokens"),
    [("v1_block_key", True), ("v2_sha256_64", True), ("v2_sha256_64", False), ("xxh3_64", False)],
)
def test_log_replays_at_every_batch(
    tmp_path: Path, algorithm: str, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each batch the folded state is the live one; with tokens it knows the symbols, without it tells nothing."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 6)
    log = {"record_tokens": tokens, "fsync": "never", "overflow": "block"}
    settings = {"secondary_blocks": 4, "block_hash": algorithm}
    with cache(**settings, log_settings=log, log=tmp_path / "log") as manager:
        traffic = Traffic(manager)
        traffic.run(range(30))
        pages = dict(manager.state.symbols.pages)
    states = states_of(tmp_path / "log")
    assert {seq: states[seq] for seq in traffic.fingerprints} == traffic.fingerprints
    for seq in list(traffic.fingerprints)[::8]:
        replayed = replay(tmp_path / "log", seq, verify=True)
        assert replayed.fingerprint == states[seq]
        replayed.state.check()
    assert replay(tmp_path / "log").state.symbols.pages == (pages if tokens else {})
    events = [event for batch in LogReader(tmp_path / "log") for event in batch.events]
    assert any(isinstance(event, SymbolsForgotten) for event in events)
    reported = [event for event in events if isinstance(event, SymbolsInterned)]
    assert reported
    assert all(bool(event.pages) == tokens for event in reported)
    written = b"".join(payload for _, payload in frames_of(tmp_path / "log"))
    assert (b"image-" in written) == (bytes([1]) * 32 in written) == tokens


def test_replayed_state_goes_on_with_the_same_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager on an exported state, and one on a fold, emit what the first one does from there on."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 6)
    manager = cache(secondary_blocks=4)
    events = [manager.state.created, *received(manager)]
    manager.bus.subscribe(events.append)
    Traffic(manager).run(range(15))
    assert manager.state.created is not None
    settings = manager.config
    twins = [
        strategies.continue_from(settings, *events),
        strategies.continue_from(settings, manager.state.created, manager.state.export()),
    ]
    records = [received(each) for each in (manager, *twins)]
    for each in (manager, *twins):
        Traffic(each).run(range(15, 30))
        each.check()
    assert records[0] == records[1] == records[2]
    assert any(isinstance(event, SymbolsForgotten) and event.pages for event in records[0])


def test_log_without_tokens_is_matched_by_what_symbols_stand_for(tmp_path: Path) -> None:
    """Such a log knows no symbols; a lookup works the keys out of the prompt's items and extra ids."""
    config = strategies.config(tokens_per_block=4, log={"record_tokens": False, "fsync": "never"})
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        served(manager, [7] * 9, multimodal=[GOOD])
    state = replay(tmp_path / "log", verify=True).state
    packed = array("i", [7] * 9).tobytes()
    plain = namespace_of(None, None, None)
    for item, blocks in ((GOOD, 2), (MultimodalItem(H2, 2, 4), 0)):
        rich = rich_tokens(packed, [item], None)
        assert rich is not None
        assert len(lookup(state, plain, rich).blocks) == blocks
    assert not lookup(state, plain, packed).blocks


# -- outside formats


def test_tensorrt_llm_dicts_show_what_symbols_stand_for() -> None:
    """Tokens come with their extra ids, blocks with the items in them, by uuid where they have one."""
    manager = cache(event_buffer_max_size=100, tokens_per_block=2)
    manager.add_sequence(
        "r", [5, 6, 7, 8, 9], extra_ids=[0, 2**64 - 1, 0, 0, 3],
        multimodal=[MultimodalItem(H1, 1, 3), MultimodalItem(H2, 4, 1, "dog.png")],
    )  # fmt: skip
    manager.store_context_blocks("r", 5)
    manager.add_tokens(["r"], [1])
    manager.add_tokens(["r"], [1])
    manager.flush()
    data = [event["data"] for event in manager.get_latest_events() if event["data"]["type"] == "stored"]
    blocks = [block for each in data for block in each["blocks"]]
    assert [[(t["token_id"], t["token_extra_id"]) for t in block["tokens"]] for block in blocks] == [
        [(5, 0), (6, 2**64 - 1)],
        [(7, 0), (8, 0)],
        [(9, 3), (1, 0)],
    ]
    assert [block["mm_keys"] for block in blocks] == [
        [{"type": "mm_key", "hash": H1.hex(), "start_offset": 0}],
        [{"type": "mm_key", "hash": H1.hex(), "start_offset": 1}],
        [{"type": "mm_key", "hash": "dog.png", "start_offset": 0}],
    ]


@pytest.mark.parametrize(
    ("adapter", "lora_id", "lora_name"),
    [
        ({}, None, None),
        ({"lora_id": 7, "lora_name": "poet"}, 7, "poet"),
        ({"lora_name": "poet"}, None, "poet"),
        ({"lora_id": 7}, 7, "7"),
    ],
)
def test_tensorrt_llm_dicts_name_the_adapter(
    adapter: dict[str, Any], lora_id: int | None, lora_name: str | None
) -> None:
    """Blocks of an adapter are not taken for the base model's, be they of the prompt or decoded."""
    manager = cache(event_buffer_max_size=100, tokens_per_block=2)
    manager.add_sequence("r", [5, 6, 7], **adapter)
    manager.store_context_blocks("r", 3)
    manager.add_tokens(["r"], [1])
    manager.add_tokens(["r"], [1])
    manager.flush()
    data = [event["data"] for event in manager.get_latest_events() if event["data"]["type"] == "stored"]
    assert [(each["lora_id"], each["lora_name"]) for each in data] == [(lora_id, lora_name)] * 2


def folded(manager: KVCacheManager) -> tuple[Feed, list[Stored]]:
    """A feed that has all events, and the stores that it told of."""
    feed = Feed()
    batches = [EventBatch(0, 0, (manager.state.created,)), manager.flush()]  # type: ignore[arg-type]
    changes = [change for batch in batches if batch is not None for change in feed.fold(batch)]
    assert {type(change) for change in changes} <= {Stored, Cleared, Removed}
    return feed, [change for change in changes if isinstance(change, Stored)]


def on_the_wire(stores: Sequence[Stored]) -> list[BlockStored]:
    decoded = decode_batch(encode_batch(stores, 1.5)).events
    assert all(isinstance(event, BlockStored) for event in decoded)
    return [event for event in decoded if isinstance(event, BlockStored)]


def plain(value: Any) -> Any:
    """Tuples as lists."""
    return list(map(plain, value)) if isinstance(value, tuple | list) else value


def test_routers_get_plain_tokens_and_items() -> None:
    """Token ids are those of the prompt, and each block's extra keys name its items and where they begin."""
    manager = cache(tokens_per_block=4)
    prompt = list(range(100, 113))
    manager.add_sequence(
        "r", prompt, cache_salt="s", multimodal=[MultimodalItem(H1, 2, 4), MultimodalItem(H2, 7, 1)]
    )
    manager.store_context_blocks("r", 13)
    feed, stores = folded(manager)
    [event] = on_the_wire(stores)
    assert event.token_ids == tuple(prompt[:12])
    salt = stores[0].namespace.salt_digest
    assert salt is not None
    assert plain(event.extra_keys) == [
        [[H1.hex(), 2], salt.hex()],
        [[H1.hex(), -2], [H2.hex(), 3]],
        None,
    ]
    assert on_the_wire([change for change in feed.snapshot() if isinstance(change, Stored)]) == [event]


def test_routers_report_extra_ids_apart() -> None:
    """Blocks of a request with extra ids carry their digest like an item's, also where all are 0."""
    manager = cache(tokens_per_block=2)
    extra = {"a": None, "b": [0] * 5, "c": [0, 0, 0, 1, 0]}
    for name, extra_ids in extra.items():
        manager.add_sequence(name, [5] * 5, extra_ids=extra_ids)
        manager.store_context_blocks(name, 5)
    _, stores = folded(manager)
    a, b, c = on_the_wire(stores)
    assert a.token_ids == b.token_ids == (5,) * 4
    assert a.extra_keys == (None, None)
    zeros, ids = (hashlib.sha256(array("Q", [0, each]).tobytes()).hexdigest() for each in (0, 1))
    assert plain(b.extra_keys) == [[[zeros, 0]], [[zeros, 0]]]
    # The first block of "c" is that of "b".
    assert (c.parent_block_hash, c.token_ids) == (b.block_hashes[0], (5, 5))
    assert plain(c.extra_keys) == [[[ids, 0]]]


def test_routers_are_reported_after_a_loss_too() -> None:
    """A feed that missed batches takes what symbols stand for from the exported state; a new cache begins anew."""
    manager, feed = cache(tokens_per_block=4), Feed()
    created = manager.state.created
    assert created is not None
    feed.fold(EventBatch(0, 0, (created,)))
    prompt = list(range(100, 109))
    manager.add_sequence("r", prompt, multimodal=[GOOD])
    manager.store_context_blocks("r", 9)
    lost = manager.flush()
    assert lost is not None
    changes = feed.fold(EventBatch(9, 0, (manager.state.export(),)))
    [event] = on_the_wire([change for change in changes if isinstance(change, Stored)])
    assert event.token_ids == tuple(prompt[:8])
    assert plain(event.extra_keys) == [[[H1.hex(), 2]], [[H1.hex(), -2]]]
    feed.fold(EventBatch(10, 0, (created, *lost.events)))
    assert not feed.lost
    [again] = on_the_wire([change for change in feed.snapshot() if isinstance(change, Stored)])
    assert again == event


def test_stores_of_plain_prompts_are_as_ever() -> None:
    """Beside items, a plain prompt's wire has the bytes that it has without them."""
    plain, mixed = cache(), cache()
    mixed.add_sequence("image", [7] * 9, multimodal=[GOOD])
    for manager in (plain, mixed):
        manager.add_sequence("r", range_of(9))
        manager.store_context_blocks("r", 9)
    assert encode_batch(folded(plain)[1], 1.5) == encode_batch(folded(mixed)[1], 1.5)


def test_admission_records_symbols() -> None:
    """`SequenceAdded` holds symbols, behind the event that says what they stand for."""
    manager = cache()
    events = received(manager)
    manager.add_sequence("r", [1, 7, 7, 2], multimodal=[MultimodalItem(H1, 1, 2, "cat.png")])
    interned, added = events[0], events[1]
    assert isinstance(interned, SymbolsInterned)
    assert isinstance(added, SequenceAdded)
    [page] = interned.pages
    assert (page.number, page.token, page.extra_id, page.digest, page.offset, page.uuid) == (
        0,
        7,
        0,
        H1,
        0,
        "cat.png",
    )
    assert array("i", added.tokens).tolist() == [1, -1, -2, 2]
    assert list(itertools.chain(sequence_of(manager, "r").tokens)) == [1, -1, -2, 2]


def test_v1_names_are_not_relied_on_where_they_are_ambiguous(tmp_path: Path) -> None:
    """v1_block_key knows no LoRA names, and not where an item begins: refused where blocks are known by name only."""
    with pytest.raises(Unsupported, match="lora_name with v1_block_key"):
        cache(block_hash="v1_block_key").add_sequence("a", [1, 2, 3], lora_name="x")
    without_tokens = {"record_tokens": False}
    with cache(tmp_path / "log", block_hash="v1_block_key", log_settings=without_tokens) as manager:
        with pytest.raises(Unsupported, match="in a log without tokens"):
            manager.add_sequence("a", [7, 7, 7, 7, 9], multimodal=[MultimodalItem(bytes(32), 0, 2)])
        manager.add_sequence("a", [7, 7, 7, 7, 9])
        manager.check()
