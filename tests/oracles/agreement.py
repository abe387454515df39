"""What the manager and the model both know, compared: each function fails by an assertion."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from events.tokens.symbols import UNKNOWN
from events.types import PRIMARY, SECONDARY, BlocksMoved, BlocksRemoved, Event, MoveReason
from kvcache.fold.prefix_tree import Run
from kvcache.fold.state import CacheState
from kvcache.results import Admission, BlockTable, Match, Replacement
from kvcache.stats import Stats
from tests.oracles.cache_model import Admitted, Model, Reuse
from tests.oracles.window_model import Window
from tests.support.engines.strategies import Symbol, cached_blocks, name_of, split_names, timed_blocks

DETACHED = -2
"""In a block table: a block that the sequence has let go of, or never needed."""


def matches_agree(said: Match, known: Reuse, windows: Mapping[int, Window]) -> None:
    """The blocks that each window would hold, and how much of one more would be copied. `windows` by their tokens."""
    assert said.reused_tokens == known.tokens
    for tokens, window in windows.items():
        claims = window.claims(known.path, known.tokens)
        found = [(block.index, block.name, block.level) for block in said.blocks if block.window == tokens]
        assert found == [(len(path) - 2, name_of(path).hex(), window.cached[path].level) for path in claims]
    copied = [(tokens, known.copied) for tokens in windows if known.copied]
    assert [(each.window, each.num_tokens) for each in said.partials] == copied


def admissions_agree(said: Admission, known: Admitted, model: Model) -> None:
    """What was reused, and the tables."""
    reused = known.reused
    assert (said.reused_tokens, said.reused_partial) == (reused.tokens, reused.copied)
    # A block that one window has in secondary is not in primary, though another window may have no use for it.
    somewhere = len(set().union(*known.onboarded))
    assert max(map(len, known.onboarded)) <= said.reused_secondary / model.size <= somewhere
    for window, table in zip(model.windows, said.block_tables, strict=False):
        tables_agree(window, said.request_id, table)
    assert len(said.block_tables) == len(model.groups)
    for window in model.cross:
        tables_agree(window, model.running[said.request_id].input, said.block_tables[-1])
    assert said.reused_encoder_tokens == min(known.input_reused * model.size, said.encoder_tokens)


def tables_agree(window: Window, request_id: Hashable, table: BlockTable) -> None:
    """How long a table is, and how many blocks the sequence does without."""
    slots, detached = table.tolist(), window.detached(request_id)
    assert len(slots) == len(window.tables[request_id])
    assert slots[:detached] == [DETACHED] * detached
    assert min(slots[detached:], default=0) >= 0


def blocks_agree(state: CacheState, index: int, window: Window) -> None:
    """Which blocks are cached at which level, held by how many, and in which order they go; and what is blank."""
    assert cached_blocks(state, index) == {
        name_of(path): (block.level, block.refs, block.stamp, len(path[-1]), block.priority)
        for path, block in window.cached.items()
    }
    assert timed_blocks(state, index) == {
        name_of(path): (block.duration, block.expiry)
        for path, block in window.cached.items()
        if block.duration or block.expiry
    }
    blank = [len(level.blank) for level in state.groups[index].levels]
    assert blank == [window.blank(PRIMARY), window.blank(SECONDARY)]


def uses_agree(state: CacheState, index: int, window: Window) -> None:
    """How often which blocks were used, in which order, and by how much the turns of cached ones are put off."""
    group: Any = state.groups[index]
    assert (group.uses is not None) == window.levels
    if window.levels:
        counted = [(name, uses) for name, uses in group.uses.by_name.items()]
        assert counted == [(name_of(path), min(uses, 4)) for path, uses in window.uses.items()]
        assert group.uses.last_turn == window.last_turn
        put_off = {
            name: run.credit
            for run in group.tree.runs.values()
            for name in names_of_run(run, group.tree.key_bytes)
        }
        assert put_off == {name_of(path): block.credit for path, block in window.cached.items()}


def names_of_run(run: Run, key_bytes: int) -> list[bytes]:
    """The names of its blocks."""
    return [bytes(run.keys[at : at + 8]) for at in range(0, len(run.keys), key_bytes)]


def gauges_agree(said: Stats, model: Model) -> None:
    """What is blank, and cached but held by none, at both levels of all windows together."""
    blank, idle = (
        tuple(sum(count(window, level) for window in model.groups) for level in (PRIMARY, SECONDARY))
        for count in (Window.blank, Window.idle)
    )
    assert (said.blocks_blank, said.blocks_unreferenced) == (blank, idle)


def swaps_agree(
    said: Sequence[Replacement], known: Mapping[int, list[int]], tables: Mapping[int, BlockTable]
) -> None:
    """Which blocks were given back because others had stored them first, by the windows' tokens."""
    for tokens, blocks in known.items():
        swaps = [each for each in said if each.window == tokens]
        assert [each.block for each in swaps] == blocks
        assert all(each.new_slot != each.old_slot for each in swaps)
        # The block may have left the window at once.
        assert all(tables[tokens][each.block] in (each.new_slot, DETACHED) for each in swaps)


def kept_agree(state: CacheState, kept: Sequence[Collection[tuple[int, int]]]) -> None:
    """Slots (group, slot) that sequences keep are of no use to any other: not blank, not cached, in no table."""
    every = [each for slots in kept for each in slots]
    assert len(every) == len(set(every))
    for index, slot in every:
        group = state.groups[index]
        assert slot not in group.levels[PRIMARY].blank
        assert not group.is_cached(PRIMARY, slot)
        assert not any(slot in sequence.tables[index] for sequence in state.sequences.values())


def symbols_agree(pairs: Collection[tuple[int, Symbol]]) -> None:
    """Equal symbols stand for equal things and the other way round; plain tokens for themselves."""
    assert len(pairs) == len({number for number, _ in pairs}) == len({meaning for _, meaning in pairs})
    assert all(
        number == meaning if isinstance(meaning, int) else UNKNOWN < number < 0 for number, meaning in pairs
    )


def removals_agree(events: Sequence[Event], window: Window) -> None:
    """What left primary or the cache, and in which order."""
    moved = [e for e in events if isinstance(e, BlocksMoved) and e.why == MoveReason.OFFLOAD]
    offloaded = [name for event in moved for name in split_names(event.names)]
    assert offloaded == [name_of(path) for path in window.offloaded]
    removed = [name for e in events if isinstance(e, BlocksRemoved) for name in split_names(e.names)]
    for paths in window.removed:
        names, removed = removed[: len(paths)], removed[len(paths) :]
        by_name = {name_of(path): path for path in paths}
        assert sorted(names) == sorted(by_name)
        order = [by_name[name] for name in names]
        assert not any(
            later[: len(path)] == path for at, path in enumerate(order) for later in order[at + 1 :]
        )
    assert not removed


def detachments_agree(state: CacheState, events: Sequence[Any], window: Window) -> None:
    """Which sequences let go of how many blocks, and in which order."""
    let_go: list[tuple[Hashable, int]] = []
    for event in events:
        if type(event).__name__ == "BlocksDetached":
            handles = array("q", event.handles)
            counts = array("I", event.counts) if event.counts else [1] * len(handles)
            let_go += zip((state.sequences[handle].request_id for handle in handles), counts, strict=True)
            assert len(event.slots) == 4 * sum(counts)
    assert let_go == window.let_go
