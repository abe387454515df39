"""Random programs for vLLM's own scheduler with a recorder beside it: after each step both say the same.

    python -m tests.support.engines.vllm_programs FIRST LAST

prints a line of JSON: how often what happened. Runs where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from events.log import LogReader
from events.types import EndReason, SequenceRemoved
from kvcache.audit.totals import audit_batches
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.prefix_tree import runs_below
from kvcache.integrations.vllm.plugin import register
from kvcache.replay import replay
from tests.support.engines.stock_vllm import StockVLLM, write_model

STEPS = 120
SALTS = (None, None, None, "a", "b")
ADAPTERS: tuple[tuple[str, int, str] | None, ...] = (
    None,
    None,
    None,
    None,
    ("x", 1, "/x"),
    ("y", 2, "/y"),
    ("x", 3, "/other"),
)
HASHES = ("sha256", "xxhash", "sha256_cbor")


class Shape(NamedTuple):
    """What a program runs on."""

    runs_ahead: bool
    blocks: int
    block_size: int
    window: int | None
    drafts: int
    chunked: bool
    hashing: str
    reserve_all: bool
    record_tokens: bool


def shape_of(rng: random.Random) -> Shape:
    """Choose one."""
    runs_ahead, drafts = rng.random() < 0.5, rng.choice((0, 0, 2, 3))
    size = rng.choice((2, 4, 16))
    window = rng.choice((None, None, None, 2 * size))
    chunked = rng.random() < 0.8
    return Shape(
        runs_ahead,
        rng.choice((24, 48, 200)),
        size,
        window,
        0 if window else drafts,
        chunked,
        rng.choice(HASHES),
        rng.random() < 0.5,
        rng.random() < 0.8,
    )


class Program:
    """An engine, and what comes to its users' minds."""

    def __init__(self, seed: int, directory: Path, *, recorded: bool = True) -> None:
        self.rng = random.Random(seed)
        self.shape = shape_of(self.rng)
        self.seen = Counter[str]()
        shape = self.shape
        self.log, self.longest = directory / "log", min(128, (shape.blocks - 1) * shape.block_size // 2)
        settings = {"log": {"record_tokens": shape.record_tokens}}
        self.engine = StockVLLM(
            write_model(directory / "model"),
            shape.blocks,
            block_size=shape.block_size,
            window=shape.window,
            runs_ahead=shape.runs_ahead,
            drafts=shape.drafts,
            tokens_per_step=self.rng.choice((16, 48)) if shape.chunked else 128,
            longest=self.longest,
            hashing=shape.hashing,
            chunked=shape.chunked,
            reserve_all=shape.reserve_all,
            additional={"kvcache": {"log": str(self.log), "settings": settings}} if recorded else {},
        )
        self.attached = self.engine.attached
        assert (self.attached is not None) == recorded
        self.numbers, self.prompts = (
            0,
            [[self.rng.randrange(2) for _ in range(self.longest)] for _ in range(3)],
        )

    def run(self) -> None:
        """All of it, compared after each step."""
        for _ in self.steps():
            self.compare()
        self._compare_log()

    def steps(self) -> Iterator[None]:
        """Do one thing after another."""
        for _ in range(STEPS):
            self._act()
            yield
        while self.engine.step(self.rng):
            yield
        self.engine.scheduler.shutdown()

    def _act(self) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self._add()
        elif chance < 0.36 and self.engine.scheduler.requests:
            self.seen["aborted"] += 1
            self.engine.abort(self.rng.choice(list(self.engine.scheduler.requests)))
        elif chance < 0.38:
            # With all preempted, or only if there is nothing to preempt.
            self.seen["reset"] += self.engine.scheduler.reset_prefix_cache(self.rng.random() < 0.5)
        else:
            self.engine.step(self.rng)

    def _add(self) -> None:
        rng, longest = self.rng, self.longest
        requests = list(self.engine.scheduler.requests.values())
        if requests and rng.random() < 0.3:
            # What one has given so far, some of which gets its names in this very step.
            begin = list(rng.choice(requests).all_token_ids)
        else:
            begin = rng.choice(self.prompts)[: rng.randrange(longest)]
        tokens = [*begin, *(rng.randrange(2) for _ in range(rng.randrange(1, 9)))][: longest - 8]
        output = rng.randrange(1, max(2, min(40, longest - len(tokens))))
        skip = rng.random() < 0.1
        self.numbers += 1
        self.engine.add(
            f"r{self.numbers}",
            tokens,
            output,
            salt=rng.choice(SALTS),
            adapter=rng.choice(ADAPTERS),
            skip=skip,
        )

    def compare(self) -> None:
        """The mirror is what vLLM has."""
        assert self.attached.attached, "the recorder has let go"
        recorder, there = self.attached.recorder, Counter(name for _, name in self.engine.names())
        recorder.check()
        tree, size = recorder.state.groups[0].tree, recorder.state.created.key_bytes
        here = {
            bytes(run.keys[at : at + size])
            for root in tree.roots.values()
            for run in runs_below(root)
            for at in range(0, len(run.keys), size)
        }
        assert here == set(there), (len(here), len(there))
        self.seen["copies"] += sum(there.values()) > len(there)
        sequences = {each.request_id: each for each in recorder.state.sequences.values()}
        tables = self.engine.tables()
        assert sequences.keys() == tables.keys(), sequences.keys() ^ tables.keys()
        for name, table in tables.items():
            assert len(sequences[name].tables[0]) == len(table)
            request = self.engine.scheduler.requests[name]
            if not self.engine.flies:
                assert sequences[name].num_tokens == request.num_tokens

    def _compare_log(self) -> None:
        replayed = replay(self.log, verify=True)
        recorder = self.attached.recorder
        assert fingerprint(replayed.state) == fingerprint(recorder.state)
        audit = audit_batches((batch, True) for batch in LogReader(self.log))
        assert audit.reused == self.engine.hits, (audit.reused, self.engine.hits)
        self.seen["admitted"] += recorder.stats().requests
        ends = [
            each.why
            for batch in LogReader(self.log)
            for each in batch.events
            if isinstance(each, SequenceRemoved)
        ]
        self.seen["preempted"] += ends.count(EndReason.PREEMPTED)
        self.seen["refused"] += audit.refusals
        self.seen["hits"] += audit.reused
        self.seen["ahead"] += self.shape.runs_ahead
        self.seen["sliding"] += self.shape.window is not None
        self.seen["drafts"] += self.shape.drafts > 0


def main(first: int, last: int) -> None:
    """Run these seeds."""
    register()
    seen = Counter[str]()
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
            program = Program(seed, Path(directory))
            try:
                program.run()
            except BaseException:
                print(f"seed {seed}: {program.shape}", file=sys.stderr)
                raise
        seen += program.seen
        seen["programs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
