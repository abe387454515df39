"""What a recorder says of vLLM's cache beside what vLLM has. Runs where vLLM is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from events.log import LogReader
from kvcache.audit.totals import Audit, audit_batches
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.positional import PositionalGroup
from kvcache.fold.prefix_tree import runs_below
from kvcache.fold.state import CacheState
from kvcache.replay import replay
from tests.support.engines.stock_vllm import StockVLLM


def names_of(state: CacheState) -> set[bytes]:
    """All that is cached of the first group."""
    assert state.created is not None
    tree, size = state.groups[0].tree, state.created.key_bytes
    return {
        bytes(run.keys[at : at + size])
        for root in tree.roots.values()
        for run in runs_below(root)
        for at in range(0, len(run.keys), size)
    }


def compare(engine: StockVLLM, can_be_found: Callable[[Counter[bytes]], set[bytes]] = set) -> bool:
    """The mirror has the names, tables and tokens that vLLM has; whether vLLM has some names twice.

    Amid a step that has not come to its end it may have less. `can_be_found` says of what is cached what counts.
    """
    assert engine.attached.attached, "the recorder has let go"
    recorder, there = engine.attached.recorder, Counter(name for _, name in engine.names())
    recorder.check()
    if engine.amid_step:
        return False
    here = names_of(recorder.state)
    assert here == can_be_found(there), (len(here), len(there))
    sequences = {each.request_id: each for each in recorder.state.sequences.values()}
    tables = engine.tables()
    assert sequences.keys() == tables.keys(), sequences.keys() ^ tables.keys()
    for name, table in tables.items():
        assert len(sequences[name].tables[0]) == len(table), name
        if not engine.flies:
            had = engine.scheduler.requests[name].num_tokens
            assert sequences[name].num_tokens == had, (name, sequences[name].num_tokens, had)
    for group in recorder.state.positional:
        _compare_group(engine, group)
    return sum(there.values()) > len(there)


def _compare_group(engine: StockVLLM, group: PositionalGroup) -> None:
    """A further group has the names, positions and tables that vLLM's has; numbers of blocks are its own."""
    recorder, number = engine.attached.recorder, group.index
    ids = recorder._ids
    names = {(ids.id_of(slot), key) for slot, names in group.names.items() for key in names}
    assert names == set(engine.names(number)), (number, len(names))
    positions = engine.positions()
    for slot, known in group.names.items():
        for key, position in known.items():
            assert positions.get((ids.id_of(slot), key), position) == position
    tables = {
        recorder.state.sequences[handle].request_id: {at: ids.id_of(slot) for at, slot in table.items()}
        for handle, table in group.tables.items()
    }
    there = {
        name: {at: block for at, block in enumerate(table) if block}
        for name, table in engine.tables(number).items()
    }
    assert tables == {name: table for name, table in there.items() if table}


def compare_log(engine: StockVLLM, log: Path, kept: int = 0) -> Audit:
    """A closed log replays to the mirror, and an audit of it counts what vLLM has counted.

    `kept`: tokens that sessions have kept for their further input, which vLLM does not count.
    """
    replayed = replay(log, verify=True)
    assert replayed.end is not None
    assert replayed.end.kind == "clean", replayed.end
    assert not replayed.checkpoints_failed
    assert fingerprint(replayed.state) == fingerprint(engine.attached.recorder.state)
    audit = audit_batches((batch, True) for batch in LogReader(log))
    assert audit.reused == engine.hits + kept, (audit.reused, engine.hits, kept)
    assert audit.counts is not None
    assert audit.counts[0] == audit.counts[1]
    assert audit.counts[1][1] == engine.hits + kept
    return audit
