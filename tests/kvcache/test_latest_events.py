"""What programs that poll are told, as they would keep book of it: no more and no less than what is cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from events.log import LogWriter
from events.types import Gap
from kvcache.fold.prefix_tree import runs_below
from kvcache.inputs import MultimodalItem, Request
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.support.engines.inside import journal_of
from tests.support.engines.traffic import Traffic, config
from tests.support.seeds import seeds

Book = dict[int, tuple[int | None, int, tuple[int, ...], int]]
"""Name to parent, level, token ids and priority."""


def keep(book: Book, events: list[dict[str, Any]]) -> None:
    """Do what a reader of the dicts does; whatever it could not make sense of fails."""
    for event in events:
        data = event["data"]
        if data["type"] == "stored":
            parent = data["parent_hash"]
            for block in data["blocks"]:
                assert parent is None or parent in book
                tokens = tuple(token["token_id"] for token in block["tokens"])
                book[block["block_hash"]] = (parent, block["cache_level"], tokens, block["priority"])
                parent = block["block_hash"]
        elif data["type"] == "updated":
            parent, level, tokens, priority = book[data["block_hash"]]
            if data["cache_level"] is not None:
                assert data["cache_level"]["old_value"] == level
                level = data["cache_level"]["new_value"]
            if data["priority"] is not None:
                priority = data["priority"]["new_value"]
            book[data["block_hash"]] = (parent, level, tokens, priority)
        elif data["type"] == "removed":
            for name in data["block_hashes"]:
                del book[name]


def cached(manager: KVCacheManager) -> Book:
    """The same of the state itself."""
    state, book = manager.state, Book()
    size, key_bytes = state.tokens_per_block, state.hashing.key_bytes
    for root in state.groups[0].tree.roots.values():
        for run in runs_below(root):
            keys = bytes(run.keys)
            names = [keys[at : at + 8] for at in range(0, len(keys), key_bytes)]
            tokens = state.symbols.spell(bytes(run.symbols)).tokens
            ids = np.frombuffer(tokens, "<i4").tolist()
            parent = run.parent.key_of_last(key_bytes)[:8] if run.start else None
            for number, name in enumerate(names):
                above = None if parent is None else int.from_bytes(parent, "big")
                block = tuple(ids[number * size : (number + 1) * size])
                book[int.from_bytes(name, "big")] = (above, run.level, block, run.priority)
                parent = name
    return book


def busy(manager: KVCacheManager) -> Traffic:
    """A cache with blocks in both levels, of two namespaces, and with an image in one of them."""
    traffic = Traffic(manager, 2)
    traffic.record(60)
    for request_id in traffic.running:
        manager.remove_sequence(request_id)
    traffic.running.clear()
    image = MultimodalItem(bytes(32), 1, 2)
    manager.add_sequences([Request("image", [1, 0, 0, 1, 1, 1], multimodal=[image], lora_id=3)])
    manager.store_context_blocks("image", 6)
    manager.set_priority("image", 70, stop=4)
    manager.flush()
    assert {level for _, level, _, _ in cached(manager).values()} == {0, 1}
    return traffic


@pytest.mark.parametrize("seed", seeds(range(3), quick=1))
def test_book_of_a_reader_is_what_is_cached(seed: int) -> None:
    """Step by step, the dicts lead to the blocks of the cache, with parents, levels, tokens and priorities."""
    manager, book = KVCacheManager(config(event_buffer_max_size=10_000)), Book()
    traffic = Traffic(manager, seed)
    for _ in range(100):
        traffic.step()
        manager.flush()
        keep(book, manager.get_latest_events())
        assert book == cached(manager)
    assert book
    manager.clear()
    keep(book, manager.get_latest_events())
    assert book == cached(manager) == {}


@pytest.mark.parametrize("with_log", [False, True])
def test_resumed_cache_reports_what_it_begins_with(tmp_path: Path, with_log: bool) -> None:
    """After `resume` a reader knows every block, parents first, and what happens next, `clear` too, fits that."""
    with KVCacheManager(config(event_buffer_max_size=10_000), log=tmp_path / "log") as manager:
        busy(manager)
    log = LogWriter(tmp_path / "log", resume=True) if with_log else None
    manager, book = KVCacheManager.resume(replay(tmp_path / "log").state, log=log), Book()
    keep(book, manager.get_latest_events())
    assert len(book) > 3
    assert book == cached(manager)
    traffic = Traffic(manager, 4)
    for _ in range(60):
        traffic.step()
        manager.flush()
        keep(book, manager.get_latest_events())
        assert book == cached(manager)
    manager.clear()
    keep(book, manager.get_latest_events())
    assert book == {}
    manager.close()


def test_state_after_a_gap_is_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole state that a log gets after a loss repeats nothing for those who poll."""
    manager, book = KVCacheManager(config(event_buffer_max_size=10_000)), Book()
    busy(manager)
    keep(book, manager.get_latest_events())
    outputs = journal_of(manager).outputs
    monkeypatch.setattr(outputs, "may_lose", True)
    gaps = [Gap(1, 2, "lost")]
    monkeypatch.setattr(outputs, "pop_gap", lambda: gaps.pop() if gaps else None)
    batch = manager.flush()
    assert batch is not None
    assert "StateExported" in {type(event).__name__ for event in batch.events}
    assert manager.get_latest_events() == []
    manager.clear()
    assert {event["data"]["type"] for event in manager.get_latest_events()} == {"removed"}


def test_beginning_larger_than_the_buffer_is_a_hole(tmp_path: Path) -> None:
    """Of a state with more runs than the buffer holds the last ones are told, and `event_id` shows the rest."""
    with KVCacheManager(config(event_buffer_max_size=2), log=tmp_path / "log") as manager:
        busy(manager)
        runs = sum(len(group.tree.runs) for group in manager.state.groups)
    assert runs > 2
    manager = KVCacheManager.resume(replay(tmp_path / "log").state)
    events = manager.get_latest_events()
    assert [event["event_id"] for event in events] == [runs - 1, runs]
    assert {event["data"]["type"] for event in events} == {"stored"}
    names = set(cached(manager))
    manager.clear()
    removed = [event["data"]["block_hashes"] for event in manager.get_latest_events()]
    held = {name for group in removed for name in group}
    assert held == names


def test_blocks_without_names_are_not_reported(tmp_path: Path) -> None:
    """A state whose blocks have no names begins with `created` alone."""
    with KVCacheManager(config(block_hash="none"), log=tmp_path / "log") as manager:
        busy_ids = manager.add_sequence("a", [1, 2, 3, 4]).request_id
        manager.store_context_blocks(busy_ids, 4)
    state = replay(tmp_path / "log").state
    assert state.created is not None
    state.created = structs.replace(
        state.created, config=manager.config.model_copy(update={"event_buffer_max_size": 5}).model_dump_json()
    )
    manager = KVCacheManager.resume(state)
    assert [event["data"]["type"] for event in manager.get_latest_events()] == ["created"]
