"""Logs of random programs: small caches that are always short of room, prompts that meet, and all that befalls logs."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from events.log import LogWriter
from events.tokens import symbols
from events.types import EventBatch, Gap, StateExported
from kvcache.config import KVCacheConfig
from kvcache.errors import CapacityError, ComputationLost, TransfersPending, UsageError
from kvcache.inputs import MultimodalItem, Request, Retention, RetentionRange
from kvcache.manager import KVCacheManager, Substitutes
from kvcache.replay import replay
from tests.support.engines import strategies
from tests.support.engines.lives import NoBytes, Seldom
from tests.support.engines.simulated import FailingCopier, LateCopier

STEPS = 400
BLIND = 3000
"""From this seed on, some requests read nothing from the cache, and tables are only appended to."""
ITEMS = (b"\x11" * 32, b"\x22" * 32, b"\x33" * 32)
ROOM = (CapacityError, TransfersPending, ComputationLost)


def random_log(
    seed: int, directory: Path, *, branches: bool = False, segment_bytes: int | None = None
) -> Path:
    """Put the log of a random program into a directory, and return it; each is written once in a process."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in _files_of(seed, branches, segment_bytes).items():
        (directory / name).touch(mode=0o600)
        (directory / name).write_bytes(content)
    return directory


@functools.cache
def _files_of(seed: int, branches: bool, segment_bytes: int | None) -> dict[str, bytes]:
    with TemporaryDirectory() as parent:
        log = write_random_log(seed, Path(parent) / "log", branches=branches, segment_bytes=segment_bytes)
        return {path.name: path.read_bytes() for path in log.iterdir()}


def write_random_log(
    seed: int, directory: Path, *, branches: bool = False, segment_bytes: int | None = None
) -> Path:
    """Write the log of a random program into a new directory, and return it. The same seed gives the same frames.

    One to three windows, blocks of 1, 2 or 4 tokens, with or without secondary, partial reuse and tokens, seldom
    without reuse, with either order of eviction; LoRA adapters, salts, extra ids, images that get the symbols of
    others; from the seed `BLIND` on requests without lookup; with `branches` also those, tokens taken back, and
    retention; copies that are late and seldom fail; lost batches; processes that end and begin anew, empty or with the
    state that the log tells.
    """
    with patch.object(symbols, "FORGET_ABOVE", 1):
        Program(seed, directory, branches=branches, segment_bytes=segment_bytes).run(STEPS)
    return directory


def whole_part(batches: Iterable[EventBatch]) -> Iterator[EventBatch]:
    """Up to where a state is told anew: what follows slots knows no contents."""
    exports = 0
    for batch in batches:
        exports += sum(isinstance(event, StateExported) for event in batch.events)
        if exports > 1:
            return
        yield batch


class LossyLog(LogWriter):
    """A log that loses what it is given while it is told to, as one whose disk cannot keep up."""

    losing = False

    def append(self, batch: EventBatch, size: int | None = None) -> bool:
        """Hand over the next batch; False if it was lost."""
        if not self.losing:
            return super().append(batch, size)
        first = batch.seq if self._lost is None else self._lost[0]
        self._lost, self._lost_by = (first, batch.seq), "the log was told to lose it"
        self._refused += 1
        self._expected_seq += 1
        return False

    def pop_gap(self) -> Gap | None:
        """Nothing to tell before the loss is over."""
        return None if self.losing else super().pop_gap()


class Program:
    """Random commands, and managers that follow each other on one log."""

    def __init__(
        self, seed: int, directory: Path, *, branches: bool = False, segment_bytes: int | None = None
    ) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.directory = directory
        self.settings = _settings(seed, rng)
        size = self.settings.tokens_per_block
        # Requests begin in a few ways, so that they meet.
        self.beginnings = [rng.choices(range(2), k=min(5 * size, 12)) for _ in range(4)]
        self.last: Request | None = None
        """Some requests are asked twice."""
        self.admitted = 0
        self.lengths: dict[int, int] = {}
        """Tokens of the running sequences."""
        self.computed: dict[int, int] = {}
        self.with_tokens = seed % 10 != 7
        self.branches = branches
        """Whether sequences branch and go back, and requests state how their blocks are to be kept."""
        self.blind = random.Random(seed) if seed >= BLIND else None
        self.log_options: dict[str, Any] = {} if segment_bytes is None else {"segment_bytes": segment_bytes}
        self.log = self.open_log(log_id=bytes(16))
        self.clock = itertools.count()
        self.begin(None)

    def open_log(self, **options: Any) -> LossyLog:
        return LossyLog(
            self.directory,
            record_tokens=self.with_tokens,
            fsync="never",
            compression="none",  # How batches are grouped shows in what is compressed.
            **self.log_options,
            **options,
        )

    def begin(self, state: Any) -> None:
        if state is not None:
            self.copier = LateCopier(NoBytes(), 0)
            self.manager = KVCacheManager.resume(state, **self.outputs())
            return
        self.copier = LateCopier(FailingCopier(NoBytes(), Seldom(self.rng)), self.rng.choice([0, 2, 5]))
        self.manager = KVCacheManager(self.settings, copier=self.copier, **self.outputs())
        self.lengths, self.computed = {}, {}

    def outputs(self) -> dict[str, Any]:
        """Where a manager's events go, and its clock."""
        return {"log": self.log, "substitutes": Substitutes(wall_ns=self.clock.__next__)}

    def run(self, steps: int) -> None:
        """Work, and end in order."""
        self.work(steps)
        self.log.losing = False
        self.manager.close()

    def work(self, steps: int) -> None:
        """Random commands."""
        # Some engines leave it to decoding to say what is computed; then windows leave blocks behind before.
        reports = self.rng.choice([1, 6, 6])
        usual = [self.admit] * 8 + [self.compute] * reports + [self.end] * 6 + [self.decode] * 6
        usual += [self.flush] * 4 + [self.tick, self.tick, self.set_priority]
        if self.branches:
            usual += [self.fork, self.rewind]
        seldom = [self.clear, self.lose, self.restart]
        for _ in range(steps):
            with suppress(*ROOM):
                self.rng.choice(seldom if self.rng.random() < 0.02 else usual)()

    # -- requests

    def admit(self) -> None:
        count = self.rng.choice([1, 1, 2, 3])
        requests = [self.request(self.admitted + index) for index in range(count)]
        self.admitted += count
        for admission, request in zip(self.manager.add_sequences(requests), requests, strict=True):
            assert isinstance(request.request_id, int)
            self.lengths[request.request_id] = len(request.tokens)
            self.computed[request.request_id] = admission.reused_tokens
        if self.rng.random() < 0.8:
            self.manager.start_transfers()

    def request(self, request_id: int) -> Request:
        rng = self.rng
        if self.last is not None and rng.random() < 0.3:
            return replace(self.last, request_id=request_id)
        usual = strategies.NAMESPACES[0]
        lora_id, lora_name, salt, *extra = rng.choice(
            [usual] * 6 + [*strategies.NAMESPACES, strategies.EXTRA]
        )
        beginning = rng.choice(self.beginnings)
        kept, more = rng.randint(1, len(beginning)), rng.randint(0, 3)
        tokens = [*beginning[:kept], *rng.choices(range(2), k=more)]
        items = []
        if rng.random() < 0.25:
            position = rng.randrange(len(tokens))
            items.append(MultimodalItem(rng.choice(ITEMS), position, rng.randint(1, len(tokens) - position)))
        extra_ids = rng.choices(range(2), k=len(tokens)) if extra else None
        self.last = Request(request_id, tokens, lora_id, lora_name, salt, items, extra_ids)
        if self.branches and rng.random() < 0.3:
            stated = [RetentionRange(rng.randint(0, 4), None, rng.choice([0, 34, 80]))]
            self.last = replace(self.last, retention=Retention(stated, rng.choice([20, 35])))
        if self.blind is not None:
            self.last = replace(self.last, lookup=self.blind.random() > 0.2)
        return self.last

    def some(self) -> list[int]:
        return self.rng.sample(list(self.lengths), min(len(self.lengths), self.rng.randint(1, 3)))

    def compute(self) -> None:
        """Mostly a chunk."""
        for request_id in self.some():
            computed = self.rng.randint(self.computed[request_id], self.lengths[request_id])
            self.manager.store_context_blocks(request_id, computed)
            self.computed[request_id] = computed

    def decode(self) -> None:
        ids = self.some()
        counts = [self.rng.randint(1, 3) for _ in ids] if self.rng.random() < 0.5 else [1] * len(ids)
        tokens = self.rng.choices(range(2), k=sum(counts))
        self.manager.add_tokens(
            ids, tokens, counts if self.rng.random() < 0.5 or max(counts, default=1) > 1 else None
        )
        for request_id, count in zip(ids, counts, strict=True):
            self.lengths[request_id] += count
            self.computed[request_id] = self.lengths[request_id] - 1

    def fork(self) -> None:
        for request_id in self.some()[:1]:
            self.manager.fork(request_id, self.admitted)
            self.lengths[self.admitted] = self.lengths[request_id]
            self.computed[self.admitted] = self.computed[request_id]
            self.admitted += 1

    def rewind(self) -> None:
        for request_id in self.some()[:1]:
            left = self.rng.randint(max(1, self.lengths[request_id] - 4), self.lengths[request_id])
            with suppress(UsageError):  # a window has let go of what would be needed
                self.manager.rewind(request_id, left)
                self.lengths[request_id] = left
                self.computed[request_id] = min(self.computed[request_id], left - 1)

    def end(self) -> None:
        for request_id in self.some()[:2]:
            self.manager.remove_sequence(request_id, self.rng.random() < 0.8)
            del self.lengths[request_id], self.computed[request_id]

    def set_priority(self) -> None:
        for request_id in self.some():
            self.manager.set_priority(request_id, self.rng.choice([0, 34, 36]), start=self.rng.randint(0, 4))

    # -- all else

    def tick(self) -> None:
        self.manager.start_transfers()
        self.copier.tick()
        self.poll()

    def poll(self) -> None:
        for request_id, computed in self.manager.poll().invalidated:
            assert isinstance(request_id, int)
            self.computed[request_id] = computed

    def flush(self) -> None:
        if self.log.losing and self.rng.random() < 0.5:
            self.log.losing = False
            self.log.flush()  # there is room for the gap then
        self.manager.flush()
        self.poll()

    def clear(self) -> None:
        self.manager.clear()
        self.poll()

    def lose(self) -> None:
        self.log.losing = True

    def restart(self) -> None:
        self.log.losing = False
        self.manager.close()
        state = replay(self.directory).state if self.with_tokens and self.rng.random() < 0.5 else None
        if self.seed % 10 == 7:
            self.with_tokens = self.rng.random() < 0.5
        self.log = self.open_log(resume=True)
        self.begin(state)


def _settings(seed: int, rng: random.Random) -> KVCacheConfig:
    windows = rng.choice([None, None, (5,), (3, 16), (4, 16), (6, 16), (2, 6, 16)])
    count = 1 if windows is None else len(windows)
    return strategies.config(
        max_sequence_length=16,
        tokens_per_block=(size := rng.choice([1, 2, 2, 4, 4])),
        primary_blocks=tuple(rng.randint(16 // size, 56 // size) for _ in range(count)),
        secondary_blocks=tuple(rng.choice([0, 0, 0, 2, 4, 8]) for _ in range(count)),
        num_layers=3,
        max_attention_window=windows,
        enable_block_reuse=seed % 10 != 3,
        enable_partial_reuse=rng.random() < 0.5,
        secondary_offload_min_priority=rng.choice([0, 35]),
        eviction_policy="levels" if seed % 3 == 1 else "lru",
        append_only_tables=seed >= BLIND,
    )
