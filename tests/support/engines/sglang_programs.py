"""Random programs for SGLang's own scheduler with a recorder beside it: after each step both say the same.

    python -m tests.support.engines.sglang_programs LOG SEED [SETTINGS]

writes one log, and prints a line of JSON: how often what happened. SETTINGS: those of SGLang that are to be others, in
JSON. Runs where SGLang is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from events.log import LogReader
from events.tokens.names import salt_digest
from events.types import PRIMARY, SECONDARY, EndReason, SequenceAdded, SequenceRemoved
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.prefix_tree import Root, Run
from kvcache.integrations.sglang.plugin import VARIABLE
from kvcache.replay import replay
from tests.support.engines.stock_sglang import VOCABULARY, WINDOW, StockSGLang

STEPS = 1000
LONGEST = 200
SALTS = (None, None, None, "a", "b")
KEYS = (None, None, None, "k")


_SEEDS = {None: b""} | {
    salt_digest(repr(both) if both[0] else salt or ""): hashlib.sha256(
        b"sglang-cache-salt-v1\0" + salt.encode()
    ).digest()
    if salt
    else b""
    for both in product(KEYS, SALTS)
    for salt in both[1:]
}
"""By digest of a salt in the log, what SGLang's hashes begin with: keys are in none of them."""


class Program:
    """An engine, and what comes to its users' minds."""

    def __init__(self, seed: int, engine: StockSGLang, look: Callable[[StockSGLang], None]) -> None:
        self.rng, self.engine, self._look = random.Random(seed), engine, look
        self.seen, self.steps, self.numbers = Counter[str](), 0, 0
        self.last_step = STEPS
        self.found: dict[str, Any] = {}
        """All requests that have come."""
        self.prompts = [[self.rng.randrange(2) for _ in range(LONGEST)] for _ in range(3)]

    def before_step(self) -> bool:
        """Look at what the last step has led to, and do something; whether there is more to do."""
        self._look(self.engine)
        self.steps += 1
        if self.steps < self.last_step:
            self._act()
        return self.steps < self.last_step or not self.engine.idle

    def _act(self) -> None:
        rng, engine = self.rng, self.engine
        chance = rng.random()
        if chance < 0.25:
            self._add()
        elif chance < 0.28 and engine.requests:
            self.seen["aborted"] += 1
            engine.abort(rng.choice(list(engine.requests)))
        elif chance < 0.4 and engine.idle:
            self.seen["reset"] += 1
            engine.scheduler.flush_cache()

    def _add(self) -> None:
        rng = self.rng
        requests = [each for each in self.found.values() if len(each.origin_input_ids) > 1]
        if requests and rng.random() < 0.4:
            other = rng.choice(requests[-8:])
            begin = list(other.origin_input_ids + other.output_ids)
        else:
            begin = rng.choice(self.prompts)[: rng.randrange(1, LONGEST)]
        tokens = [*begin, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9)))][: LONGEST - 40]
        self.numbers += 1
        name = f"r{self.numbers}."  # SGLang aborts all whose names begin with one
        self.engine.add(name, tokens, rng.randrange(1, 40), salt=rng.choice(SALTS), key=rng.choice(KEYS))
        self.found[name] = self.engine.requests[name]

    def finish(self, log: Path) -> None:
        """Close the log, and compare it with what SGLang has counted."""
        attached = self.engine.attached
        attached.close()
        replayed = replay(log, verify=True)
        assert replayed.end is not None
        assert (replayed.end.kind, replayed.checkpoints_failed) == ("clean", [])
        assert fingerprint(replayed.state) == fingerprint(attached.recorder.state)
        events = [event for batch in LogReader(log) for event in batch.events]
        first = {
            event.request_id: event.reused + event.reused_external
            for event in events
            if isinstance(event, SequenceAdded) and not event.resumed
        }
        assert {name: self.found[str(name)].cached_tokens for name in first} == first
        for event in events:
            self.seen[type(event).__name__] += 1
            self.seen["preempted"] += isinstance(event, SequenceRemoved) and event.why == EndReason.PREEMPTED
        self.seen["exchanged"] = sum(
            slot + 1 != self.engine.attached.recorder._ids.id_of(slot)
            for slot in range(
                self.engine.scheduler.token_to_kv_pool_allocator.size_full // self.engine.cache.page_size
            )
        )
        self.seen["admitted"], self.seen["reused"] = len(first), sum(first.values())


def compare(engine: StockSGLang) -> None:
    """The mirror has the pages, contents and tables that SGLang has."""
    attached, cache = engine.attached, engine.cache
    assert attached.attached, "the recorder has let go"
    recorder, size = attached.recorder, cache.page_size
    recorder.check()
    group, page_of = recorder.state.groups[0], recorder._ids.id_of
    there = {index // size for index in cache.tree_core.all_values_flatten().tolist()}
    here = {page_of(slot) for run in group.tree.runs.values() if run.level == PRIMARY for slot in run.slots}
    assert here == there, (sorted(here - there), sorted(there - here))
    engine.cache.take_events()
    hashes = {level: Counter(hashes_of(recorder.state, level)) for level in (PRIMARY, SECONDARY)}
    assert hashes[PRIMARY] == +engine.contents["GPU"]
    assert not hashes[SECONDARY] - engine.contents["CPU_PINNED"]
    for sequence in recorder.state.sequences.values():
        request = engine.requests[sequence.request_id]
        row = cache.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        pages = [int(index) // size for index in row[: request.kv.kv_allocated_len : size]]
        assert list(map(page_of, sequence.tables[0])) == pages, sequence.request_id
        tokens = request.origin_input_ids + request.output_ids
        assert sequence.num_tokens == len(tokens), sequence.request_id
    if recorder.state.positional:
        compare_windows(engine, recorder)


def compare_windows(engine: StockSGLang, recorder: Any) -> None:
    """Of layers with sliding windows the mirror has the pages, contents and holders that SGLang has."""
    cache, size, (group,) = engine.cache, engine.cache.page_size, recorder.state.positional
    pools, first = engine.scheduler.token_to_kv_pool_allocator, group.pool.start - 1
    under = (pools.full_to_swa_index_mapping // size).tolist()
    names = dict[int, bytes]()
    for run in recorder.state.groups[0].tree.runs.values():
        for at, slot in enumerate(run.slots):
            page = under[recorder._ids.id_of(slot) * size]
            if page:
                names[page] = bytes(run.keys[at * group.key_bytes : (at + 1) * group.key_bytes])
    here = {slot - first: key for slot, held in group.names.items() for key in held}
    assert here == names, (here.keys() - names.keys(), names.keys() - here.keys(), here, names)
    assert len(names) * size == cache.swa_evictable_size() + cache.swa_protected_size()
    pool = pools.swa_attn_allocator
    free = {
        page
        for pages in (pool.free_pages, pool.release_pages)
        if pages is not None
        for page in pages.tolist()
    }
    assert {slot - first for slot in group.used()} == set(range(1, len(group.pool) + 1)) - free
    for handle, table in group.tables.items():
        request = engine.requests[recorder.state.sequences[handle].request_id]
        row = cache.req_to_token_pool.req_to_token[request.kv.req_pool_idx].tolist()
        assert {at: slot - first for at, slot in table.items()} == {at: under[row[at * size]] for at in table}
        locked = min([at for at in table if at * size < request.kv.cache_protected_len], default=-1) * size
        assert locked < 0 or locked + WINDOW + size > request.kv.cache_protected_len


def hashes_of(state: Any, level: int) -> Iterator[int]:
    """What SGLang calls the pages that are cached in a level: their own hashes, made anew from tokens."""
    size = state.groups[0].tree.block_bytes
    for namespace, root in state.groups[0].tree.roots.items():
        yield from _hashes_below(root, _SEEDS[namespace.salt_digest], size, level)


def _hashes_below(node: Root | Run, digest: bytes, size: int, level: int) -> Iterator[int]:
    for run in node.children.values():
        end = digest
        for at in range(0, len(run.symbols), size):
            end = hashlib.sha256(end + bytes(run.symbols[at : at + size])).digest()
            if run.level == level:
                yield int.from_bytes(end[:8], "big", signed=True)
        yield from _hashes_below(run, end, size, level)


def main(log: Path, seed: int, settings: dict[str, Any]) -> None:
    """Run one program."""
    os.environ[VARIABLE] = str(log)
    with tempfile.TemporaryDirectory() as directory:
        engine = StockSGLang(Path(directory), settings.pop("tokens", 640), **settings)
        program = Program(seed, engine, compare)
        engine.serve(program.before_step)
        program.finish(log)
    print(json.dumps(program.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
