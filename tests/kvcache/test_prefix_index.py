"""The prefix index says what a plain model says, whatever it is told."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.feed.fold import Feed
from events.formats.vllm import BlockStored, VLLMBatch, decode_batch, encode_batch
from events.types import EventBatch
from kvcache import KVCacheManager, PrefixIndex
from kvcache.errors import CapacityError
from kvcache.prefixes.index import Overlap
from kvcache.prefixes.publisher import WorkerRank
from tests.oracles.prefix_model import NaiveIndex
from tests.support.engines.strategies import NAMESPACES, config, name_of
from tests.support.feeds.prefix_streams import Honest, Liar
from tests.support.seeds import seeds

PROMPTS = 4
"""Asked after each batch."""


def agree(index: PrefixIndex, model: NaiveIndex, rng: random.Random, names: Sequence[Any]) -> None:
    """The index keeps its laws, and answers and counts as the model does."""
    index.check()
    for (worker, rank), publisher in model.publishers.items():
        said = Counter(
            {key: count for key, count in msgspec.structs.asdict(index.counts(worker, rank)).items() if count}
        )
        assert said == +publisher.counts
        assert index.resident(worker, rank) == publisher.resident()
    for _ in range(PROMPTS):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(24))]
        adapter = rng.choice([None, None, None, "style", 7])
        assert index.match(tokens, lora=adapter) == model.match(tokens, adapter)
        extras: list[Any] = [
            rng.choice([(), (), ("img", 3), (["img", 4],), ("salt",)]) for _ in range(rng.randrange(4))
        ]
        assert index.match(tokens, lora=adapter, extra_keys=extras) == model.match(tokens, adapter, extras)
        salted = [(*extras[0], "salt")] if extras and "salt" not in extras[0] else extras[:1] or [("salt",)]
        assert index.match(tokens, lora=adapter, extra_keys=extras, salt="salt") == model.match(
            tokens, adapter, salted + extras[1:]
        )
        hashes = [rng.choice(names) for _ in range(rng.randrange(8))]
        assert index.match_hashes(hashes) == model.match_hashes(hashes)


def saved(index: PrefixIndex, directory: Path) -> bytes:
    index.save(directory / "saved")
    return (directory / "saved").read_bytes()


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the ends of runs are met."""
    monkeypatch.setattr("kvcache.prefixes.tree.RUN_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvcache.prefixes.source.RUN_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvcache.prefixes.snapshot.RUN_BLOCKS_MAX", 5)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("seed", seeds(range(24), quick=3))
def test_whatever_is_reported_the_model_says_the_same(seed: int, tmp_path: Path) -> None:
    """Honest publishers and liars at once, over groups, levels, adapters and extras; saved and loaded in between."""
    rng = random.Random(seed)
    honest = [Honest(rng, groups, salt) for salt, groups in enumerate((1, 1, 2, 3))]
    liars = [Liar(rng) for _ in range(2)]
    index, model = PrefixIndex(), NaiveIndex()
    names: list[Any] = [*liars[0].names]
    for step in range(120):
        number = rng.randrange(6)
        source = (honest + liars)[number]
        events = tuple(source.event() for _ in range(rng.randrange(4)))
        batch = VLLMBatch(0.0, events, rng.choice([None, 0, 1]) if number == 5 else 0)
        index.apply(("worker", number), batch)
        model.apply(("worker", number), batch)
        names += [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes][
            -5:
        ]
        agree(index, model, rng, names)
        if step % 40 == 39:
            index.save(tmp_path / "index")
            index = PrefixIndex.load(tmp_path / "index")
            agree(index, model, rng, names)
    for key in list(model.publishers):
        del model.publishers[key]
        index.remove_worker(*key)
        agree(index, model, rng, names)
    assert saved(index, tmp_path) == saved(PrefixIndex(), tmp_path)


class RealWorker:
    """A manager at work on random requests, and what its feed sends."""

    def __init__(self, rng: random.Random, windows: tuple[int, ...] | None) -> None:
        self.rng = rng
        settings = config(
            max_attention_window=windows,
            num_layers=len(windows or (1,)),
            primary_blocks=16,
            secondary_blocks=8,
            enable_partial_reuse=False,
        )
        self.manager = KVCacheManager(settings)
        self.feed = Feed()
        created = self.manager.state.created
        assert created is not None
        self.groups = created.groups
        self.batches = [self.reported(EventBatch(0, 0, (created,)))]
        self.running: list[int] = []
        self.next_id = 0

    def reported(self, batch: EventBatch) -> VLLMBatch:
        return decode_batch(encode_batch(self.feed.fold(batch), 0.0, 0, self.groups))

    def step(self) -> VLLMBatch:
        rng, manager = self.rng, self.manager
        try:
            command = rng.randrange(4)
            if command == 0 or not self.running:
                prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 18))]
                lora_id, lora_name, salt = rng.choice(NAMESPACES)[:3]
                manager.add_sequence(
                    self.next_id, prompt, lora_id=lora_id, lora_name=lora_name, cache_salt=salt
                )
                self.running.append(self.next_id)
                self.next_id += 1
            elif command == 1:
                manager.add_tokens(self.running, [rng.randrange(1, 3) for _ in self.running])
            else:
                manager.remove_sequence(self.running.pop(rng.randrange(len(self.running))))
        except CapacityError:
            for request in self.running:
                manager.remove_sequence(request)
            self.running.clear()
        manager.start_transfers()
        manager.poll()
        batch = manager.flush()
        return VLLMBatch(0.0, (), 0) if batch is None else self.reported(batch)

    def reusable(self, tokens: list[int], namespace: Any) -> int:
        """Tokens in full blocks that a prompt would find, were it one token longer."""
        lora_id, lora_name, salt = namespace[:3]
        blocks = self.manager.count_reusable(
            [*tokens, 1], lora_id=lora_id, lora_name=lora_name, cache_salt=salt
        )
        return 2 * blocks


WINDOWS: Sequence[tuple[int, ...] | None] = (None, (24, 5), (4, 7, 24), (3,))


@pytest.mark.parametrize("seed", seeds(range(8), quick=2))
def test_real_workers_reuse_what_the_index_says(seed: int) -> None:
    """Managers with one window and with several, through the feed and its bytes: all agree on every prompt."""
    rng = random.Random(seed)
    workers = [RealWorker(rng, each) for each in WINDOWS]
    index, model = PrefixIndex(), NaiveIndex()
    overlaps = 0
    for _ in range(150):
        for number, worker in enumerate(workers):
            batch = worker.step()
            index.apply(number, batch)
            model.apply(number, batch)
        index.check()
        tokens = [rng.randrange(1, 3) for _ in range(rng.randrange(18))]
        namespace = rng.choice(NAMESPACES)
        lora_id, lora_name, salt = namespace[:3]
        adapter = str(lora_id) if lora_id is not None else lora_name
        digest = None if salt is None else hashlib.sha256(salt.encode()).hexdigest()
        by_tokens = index.match(tokens, lora=adapter, salt=digest)
        assert by_tokens == model.match(tokens, adapter, [[digest]] if digest else [])
        by_hashes = index.match_hashes(names_of(namespace, tokens))
        for number, worker in enumerate(workers):
            reusable = worker.reusable(tokens, namespace)
            assert 2 * by_hashes.get(WorkerRank(number, 0), NOTHING).secondary == reusable
            found = by_tokens.get(WorkerRank(number, 0), NOTHING)
            # Where all windows slide, blocks may come when nobody knows any more what was before them.
            assert found.secondary == reusable or (WINDOWS[number] == (3,) and found.secondary < reusable)
            overlaps += reusable > 0
    assert overlaps > 40
    for number in range(len(workers)):
        counts = index.counts(number)
        assert (counts.stores_without_tokens, counts.contradictions, counts.aliases) == (0, 0, 0)
        assert (counts.repeated_stores, counts.unknown_removals) == (0, 0)
    assert index.counts(0).orphans == 0


NOTHING = Overlap(0, 0, 0)


def names_of(namespace: Any, tokens: Sequence[int]) -> list[int]:
    """The hashes of a prompt's blocks, as our feed has them."""
    path: tuple[Any, ...] = (namespace,)
    names = []
    for at in range(0, len(tokens) - 1, 2):
        path = (*path, tuple(tokens[at : at + 2]))
        names.append(int.from_bytes(name_of(path), "big"))
    return names
