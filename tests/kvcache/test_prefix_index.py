"""The prefix index says what a plain model says, whatever it is told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, VLLMBatch, VLLMEvent
from kvcache import PrefixIndex
from kvcache.prefixes import tree
from tests.prefix_model import NaiveIndex
from tests.prefix_streams import Honest, Liar

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


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the ends of runs are met."""
    monkeypatch.setattr("kvcache.prefixes.tree.RUN_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvcache.prefixes.holder.RUN_BLOCKS_MAX", 5)
    monkeypatch.setattr("kvcache.prefixes.check.RUN_BLOCKS_MAX", 5)


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_told_the_model_says_the_same(seed: int, tmp_path: Path) -> None:
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
    assert index._tree.roots == {}
