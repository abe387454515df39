"""Logs of engines: nothing is lost on the way to the log and back, and the fold has what is resident."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from events.feed.changes import AnyChange, Cleared, EncodedEvent
from events.formats.vllm import decode_batch, encode_batch
from events.subscribe.workers import (
    MOST_COPIES,
    FeedState,
    SeveralWorkers,
    WorkerFeed,
    WorkerState,
    blocks_of,
    from_wire,
    longest_prefixes,
    stores_of,
    to_wire,
)
from events.types import (
    AnyEvent,
    EventBatch,
    FeedGap,
    FeedReceived,
    FeedRemoved,
    FeedRestarted,
    FeedStarted,
    FeedStored,
    Gap,
    WorkerSeen,
)
from tests.oracles.wire_packer import pack_wire
from tests.support.columns import pack_i32
from tests.support.places import ROOT
from tests.support.seeds import seeds

GOLDEN = json.loads((ROOT / "tests" / "golden" / "vllm_wire.json").read_text(encoding="utf-8"))
MAPS = {
    vector["name"]: bytes.fromhex(vector["hex"])
    for vector in [*GOLDEN["read"], *GOLDEN["written"]]
    if all(isinstance(event, dict) for event in msgspec.msgpack.decode(bytes.fromhex(vector["hex"]))[1])
}


def without_nothing(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if value is not None}


@pytest.mark.parametrize("name", MAPS)
def test_what_engines_say_comes_back_as_it_was(name: str) -> None:
    """All fields of each event that is known, those that are not known here among them, are there again."""
    said = msgspec.msgpack.decode(MAPS[name])[1]
    kinds = ("BlockStored", "BlockRemoved")
    again = [
        msgspec.msgpack.decode(to_wire(reported))
        for event in decode_batch(MAPS[name]).events
        if isinstance(reported := from_wire(0, event), FeedStored | FeedRemoved)
    ]
    assert [without_nothing(event) for event in again] == [
        without_nothing(event) for event in said if event["type"] in kinds
    ]
    for event in again:
        always = {"medium", "block_hashes"}
        always |= {"parent_block_hash", "token_ids", "lora_name"} if event["type"] == kinds[0] else set()
        assert always <= event.keys()


FURTHER = ("kv_cache_spec_kind", "session_id", "lookahead_token_ids", "x")


def store(*hashes: int | bytes, parent: int | None = None, size: int = 2, **more: Any) -> FeedStored:
    """A store of blocks whose tokens follow from their names."""
    tokens = [token for name in hashes for token in range(int(name) % 1000, int(name) % 1000 + size)]
    extra = {key: more.pop(key) for key in ("extra_keys", *FURTHER) if key in more}
    return FeedStored(
        worker=0,
        block_hashes=hashes,
        parent_block_hash=parent,
        tokens=pack_i32(tokens),
        block_size=size,
        more=msgspec.msgpack.encode(extra) if extra else b"",
        **more,
    )


def test_blocks_make_the_event_that_they_were_taken_from() -> None:
    """Whatever a store says, its blocks together say the same again."""
    for event in (
        store(1, 2, 3),
        store(1, 2, 3, parent=9, medium="CPU", group_idx=2, lora_name="a", ownership="fs"),
        store(1, 2, extra_keys=[["salt"], None], session_id="s", lookahead_token_ids=[[1], [2]]),
        store(1, 2, x=[1, 2]),
        msgspec.structs.replace(store(1, 2), tokens=b"", block_size=0),
        msgspec.structs.replace(store(1, 2), tokens=bytes(40)),
    ):
        [again] = stores_of(blocks_of(event))
        more = [msgspec.msgpack.decode(each.more) if each.more else {} for each in (again, event)]
        assert more[0] == more[1]
        assert msgspec.structs.replace(again, more=b"") == msgspec.structs.replace(event, more=b"")


def test_a_part_of_a_store_keeps_what_is_its_own() -> None:
    """Of a run whose inner block has gone, both parts have their tokens, keys and parents."""
    worker = WorkerState(WorkerSeen(worker=0, source="a", topic="", rank=0))
    slides: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "session_id": "x"}
    worker.store(store(1, 2, 3, extra_keys=[["s"], None, ["i"]], **slides))
    worker.remove(FeedRemoved(worker=0, block_hashes=(2,)))
    assert list(worker.resident()) == [
        store(1, extra_keys=[["s"]], **slides),
        store(3, parent=2, extra_keys=[["i"]], **slides),
    ]


def test_what_hangs_after_a_block_on_its_way_is_reported_with_it() -> None:
    """A block that is gone is told, and taken back, as long as something is there that nobody could place otherwise."""
    worker = WorkerState(WorkerSeen(worker=0, source="a", topic="", rank=0))
    worker.store(store(1, 2, 3))
    worker.remove(FeedRemoved(worker=0, block_hashes=(1, 2)))
    gone = [FeedRemoved(worker=0, block_hashes=(name,)) for name in (2, 1)]
    assert list(worker.resident()) == [store(1, 2, 3), *gone]
    worker.store(store(1, medium="CPU"))
    assert list(worker.resident()) == [store(1, medium="CPU"), store(2, 3, parent=1), gone[0]]
    worker.remove(FeedRemoved(worker=0, block_hashes=(3,)))
    assert list(worker.resident()) == [store(1, medium="CPU")]
    worker.remove(FeedRemoved(worker=0, block_hashes=(1,), medium="CPU"))
    assert list(worker.resident()) == []
    assert worker.lineage.kept == {}


def test_a_store_with_holes_is_reported_with_its_whole_span() -> None:
    """Where nobody knows which tokens are whose, the blocks that are left are told with all of them."""
    worker = WorkerState(WorkerSeen(worker=0, source="a", topic="", rank=0))
    event = msgspec.structs.replace(store(1, 2, parent=5), tokens=pack_i32(list(range(10))))
    worker.store(event)
    worker.remove(FeedRemoved(worker=0, block_hashes=(1,)))
    assert list(worker.resident()) == [msgspec.structs.replace(event, block_hashes=(2,))]


class Engine:
    """Says at random what engines say, with copies; `copies` is what is there by simple counting."""

    def __init__(self, seed: int, *, copies: bool) -> None:
        self.rng = random.Random(seed)
        self.copies: Counter[tuple[str, int, int]] = Counter()
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}
        self._repeats = copies

    def batch(self) -> bytes:
        """The wire's bytes of some events."""
        return pack_wire([1.5, [self._event() for _ in range(self.rng.randrange(4))], 0])

    def _event(self) -> dict[str, Any]:
        rng, chance = self.rng, self.rng.random()
        if chance < 0.01:
            self.copies.clear()
            return {"type": "AllBlocksCleared"}
        there = [key for key, count in self.copies.items() if count]
        medium, group = rng.choice(["GPU", "CPU"]), rng.randrange(2)
        if chance < 0.45 and there:
            medium, group, _ = rng.choice(there)
            names = [name for place, its, name in there if (place, its) == (medium, group)]
            gone = rng.sample(names, rng.randrange(1, min(4, len(names)) + 1))
            self.copies.subtract({(medium, group, name): 1 for name in gone})
            return {"type": "BlockRemoved", "block_hashes": gone, "medium": medium, "group_idx": group}
        return self._store(medium, group)

    def _store(self, medium: str, group: int) -> dict[str, Any]:
        rng = self.rng
        there = {name for (_, its, name), count in self.copies.items() if count and its == group}
        known = [name for name, parent in self.parents.items() if parent is None or parent in there]
        if self._repeats and known and rng.random() < 0.3:
            names = [rng.choice(known)]
        else:
            names = [rng.getrandbits(64) | 1 << 63 for _ in range(rng.randrange(1, 5))]
            for name, parent in zip(names, [rng.choice([None, *sorted(there)]), *names], strict=False):
                self.parents[name] = parent
                self.tokens[name] = [rng.randrange(-1, 1 << 20) for _ in range(3)]
        self.copies.update({(medium, group, name): 1 for name in names})
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": self.parents[names[0]],
            "token_ids": [token for name in names for token in self.tokens[name]],
            "block_size": 3,
            "lora_id": None,
            "medium": medium,
            "lora_name": rng.choice([None, "a"]),
            "extra_keys": [["x", name] for name in names],
            "group_idx": group,
        }


class NaiveRouter:
    """Reads the wire with msgspec alone; counts stores, or only notes that there was one."""

    def __init__(self, *, counts: bool) -> None:
        self.counts = counts
        self.there: Counter[tuple[str, int, int]] = Counter()
        self.orphans = 0
        self.said: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.there.clear()
                continue
            medium, group = event["medium"], event["group_idx"]
            size, parent = event.get("block_size"), event.get("parent_block_hash")
            if parent is not None and not any(
                (place, group, parent) in self.resident for place in ("GPU", "CPU")
            ):
                self.orphans += 1
            for at, name in enumerate(event["block_hashes"]):
                key = (medium, group, name)
                if event["type"] == "BlockRemoved":
                    self.there[key] = self.there[key] - 1 if self.counts else 0
                    assert self.there[key] >= 0
                    continue
                self.there[key] = self.there[key] + 1 if self.counts else 1
                tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                self.said[name] = (parent, tokens, event["extra_keys"][at])
                parent = name

    @property
    def resident(self) -> set[tuple[str, int, int]]:
        return {key for key, count in self.there.items() if count}


def resident(worker: WorkerState) -> set[tuple[str, int, Any]]:
    return {(place.medium, place.group, name) for place, there in worker.blocks.items() for name in there}


def log_batch(seq: int, *events: AnyEvent) -> EventBatch:
    return EventBatch(seq, seq, events)


BEGINNING = (
    FeedStarted(endpoints=("a",)),
    WorkerSeen(worker=0, source="a", topic="kv", rank=0),
    FeedReceived(worker=0, number=0, published_ts=1, replayed=False),
)


@pytest.mark.parametrize("seed", seeds(range(100), quick=6))
def test_fold_feed_and_snapshot_agree_with_counting(seed: int) -> None:
    """After every batch the fold has what simple counting has, and so have routers, of all kinds, early and late."""
    engine, state, feed = Engine(seed, copies=seed % 2 == 0), FeedState(), WorkerFeed()
    routers = [NaiveRouter(counts=True), NaiveRouter(counts=False)]
    for seq in range(120):
        reported = [from_wire(0, event) for event in decode_batch(engine.batch()).events]
        batch = log_batch(seq, *(BEGINNING if not seq else ()), *reported)
        for event in batch.events:
            state.apply(event)
        payload = encode_batch(feed.fold(batch), 1.5)
        worker = state.workers[0]
        expected = {key for key, count in engine.copies.items() if count}
        assert resident(worker) == expected
        for router in routers:
            router.take(payload)
            assert router.resident == expected
        late = NaiveRouter(counts=True)
        late.take(encode_batch(list(feed.snapshot()), 1.5))
        assert late.resident == expected
        assert set(late.there.values()) <= {0, 1}
        for name in {name for _, _, name in expected}:
            assert late.said[name] == (engine.parents[name], tuple(engine.tokens[name]), ["x", name])
        assert late.orphans == 0
    again, worker = FeedState(), state.workers[0]
    for event in (*BEGINNING, *worker.resident(), *worker.copied()):
        again.apply(event)
    assert again.workers[0].blocks == worker.blocks
    assert again.workers[0].copies == worker.copies
    assert again.workers[0].lineage.kept == worker.lineage.kept


def test_copies_are_bounded() -> None:
    """However often a block is stored again, the state is told in few events; it is gone too early, never too late."""
    state = FeedState()
    for event in BEGINNING:
        state.apply(event)
    for _ in range(5000):
        state.apply(store(1, 2, 3))
    worker = state.workers[0]
    assert set(worker.copies.values()) == {MOST_COPIES}
    reported = [*worker.resident(), *worker.copied()]
    assert len(reported) == MOST_COPIES
    assert all(event.block_hashes == (1, 2, 3) for event in reported)
    for _ in range(MOST_COPIES):
        assert worker.blocks
        state.apply(FeedRemoved(worker=0, block_hashes=(1, 2, 3)))
    assert not worker.blocks


def changes(feed: WorkerFeed, *batches: EventBatch) -> list[list[AnyChange]]:
    return [feed.fold(batch) for batch in batches]


def reported(change: AnyChange) -> str:
    if isinstance(change, Cleared):
        return "cleared"
    assert isinstance(change, EncodedEvent)
    event = msgspec.msgpack.decode(change.encoded)
    return f"{event['type']} {event['block_hashes']}"


def test_losses_and_restarts_clear() -> None:
    """Behind a loss, a restart and a new epoch nothing is known but what follows, and routers are told so."""
    feed = WorkerFeed()
    said = changes(
        feed,
        log_batch(0, *BEGINNING, store(1)),
        log_batch(1, FeedGap(worker=0, first=1, last=4, reason="not received"), store(2)),
        log_batch(2, FeedRestarted(worker=0, last=9, first=0), store(3)),
        log_batch(3, FeedStarted(endpoints=()), BEGINNING[1], store(4)),
        log_batch(4, Gap(first_seq=4, last_seq=4, reason="x")),
        log_batch(5, store(9)),
        log_batch(6, *BEGINNING, store(5)),
    )
    assert [[reported(change) for change in each] for each in said] == [
        ["cleared", "BlockStored [1]"],
        ["cleared", "BlockStored [2]"],
        ["cleared", "BlockStored [3]"],
        ["cleared", "BlockStored [4]"],
        [],
        [],
        ["cleared", "BlockStored [5]"],
    ]


def test_a_feed_is_of_one_worker() -> None:
    """With two workers the feed has to be told whose it is; then it says nothing of the other one."""
    second = WorkerSeen(worker=1, source="b", topic="", rank=3)
    other = msgspec.structs.replace(store(2), worker=1)
    with pytest.raises(SeveralWorkers, match="it has a, b#3"):
        WorkerFeed().fold(log_batch(0, *BEGINNING, second))
    feed = WorkerFeed("b#3")
    [said] = changes(feed, log_batch(0, *BEGINNING, second, store(1), other))
    assert [reported(change) for change in said] == ["cleared", "BlockStored [2]"]


def test_prefixes() -> None:
    """A prompt is found up to the first block that is missing, in its adapter and under its salt only."""
    worker = WorkerState(WorkerSeen(worker=0, source="a", topic="", rank=0))
    prompt = pack_i32([1, 2, 2, 3, 3, 4, 7])
    worker.store(store(1, 2, 3))
    worker.store(msgspec.structs.replace(store(1), lora_name="sql", block_hashes=(11,)))
    worker.store(msgspec.structs.replace(store(1, extra_keys=[["secret"]]), block_hashes=(21,)))

    def found(**scope: str) -> tuple[int, int]:
        [prefix] = longest_prefixes([worker], prompt, **scope)
        return prefix.tokens, prefix.blocks

    assert (found(), found(lora="sql"), found(salt="secret"), found(salt="x")) == (
        (6, 3),
        (2, 1),
        (2, 1),
        (0, 0),
    )
    worker.remove(FeedRemoved(worker=0, block_hashes=(2,)))
    assert found() == (2, 1)
    worker.store(store(2, parent=1, medium="CPU"))
    [prefix] = longest_prefixes([worker], prompt)
    assert (prefix.tokens, prefix.media) == (6, {"GPU": 2, "CPU": 1})
