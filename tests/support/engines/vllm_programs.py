"""Random programs for vLLM's own scheduler with a recorder beside it: after each step both say the same.

    python -m tests.support.engines.vllm_programs FIRST LAST [hybrid]

prints a line of JSON: how often what happened. Runs where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from events.log import LogReader
from events.types import BlocksRemoved, EndReason, PoolShared, RemoveReason, SequenceRemoved
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.reasons import Reason
from kvcache.integrations.vllm.plugin import register
from kvcache.whatif.trial import Trial, play
from tests.support.engines.stock_vllm import StockVLLM
from tests.support.engines.vllm_mirror import compare, compare_log
from tests.support.engines.vllm_model import write_model

STEPS = 120
MOST_STEPS = 10_000
"""Until all requests have ended."""
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
HYBRIDS = (
    ("sliding",),
    ("state",),
    ("state", "state"),
    ("sliding", "state"),
    ("chunked",),
    ("state", "state", "sliding"),
    ("full", "sliding"),
)
"""What there is beside full attention."""
HASHES = ("sha256", "xxhash", "sha256_cbor")


class Shape(NamedTuple):
    """What a program runs on."""

    runs_ahead: bool
    blocks: int
    block_size: int
    window: int | None
    others: tuple[str, ...]
    retention: int | None
    drafts: int
    chunked: bool
    hashing: str
    reserve_all: bool
    record_tokens: bool
    by_priority: bool
    on_failure: str | None
    """With a connector: what becomes of requests of which it fails to load something."""
    eagle: bool
    """Whether drafts are EAGLE's, for which the last block of a hit is computed again."""
    in_flight: int
    """Steps that are scheduled before the outputs of the first of them come."""
    embeddings: bool
    """Whether some prompts come as embeddings."""
    factors: tuple[int, ...]
    """How many times as large as `block_size` the blocks of each group are, from the first one on again."""


def shape_of(rng: random.Random, *, hybrid: bool = False) -> Shape:
    """Choose one. `hybrid`: with layers of several kinds."""
    runs_ahead, drafts = rng.random() < 0.5, rng.choice((0, 0, 2, 3))
    size = rng.choice((2, 3, 4, 16, 24))
    blocks = rng.choice((10, 24, 48, 200))
    window = rng.choice((None, None, None, 2 * size))
    others: tuple[str, ...] = ()
    if hybrid:
        others, window = rng.choice(HYBRIDS), None
        size, blocks = max(size, 4), max(blocks, 48)
    chunked = rng.random() < 0.8
    drafts = 0 if "chunked" in others else drafts
    factors = (1,) if {"state", "chunked"} & set(others) or not hybrid else rng.choice(((1,), (1, 2), (2, 1)))
    return Shape(
        runs_ahead,
        blocks,
        size,
        window,
        others,
        rng.choice((0, 0, None)) if hybrid else 0,
        drafts,
        chunked,
        rng.choice(HASHES),
        rng.random() < 0.5,
        rng.random() < 0.8,
        rng.random() < 0.3,
        None if window or hybrid else rng.choice((None, None, "fail", "recompute")),
        drafts > 0 and rng.random() < 0.5,
        rng.choice((0, 0, 1)) if not runs_ahead and not drafts else 0,
        rng.random() < 0.2,
        factors,
    )


class Program:
    """An engine, and what comes to its users' minds."""

    sessions = True
    """Whether some requests get further input."""

    def __init__(self, seed: int, directory: Path, *, recorded: bool = True, hybrid: bool = False) -> None:
        self.rng = random.Random(seed)
        self.shape = self._choose_shape(hybrid)
        self.seen = Counter[str]()
        self.skipping = set[str]()
        """Requests that look nothing up."""
        shape = self.shape
        groups = 1 + len(shape.others) + (shape.window is not None)
        room = (shape.blocks - 1) * shape.block_size // groups
        self.log, self.longest = directory / "log", min(128, room // 2)
        if groups == 1 and not shape.drafts:
            self.longest = min(128, room // self.rng.choice((1, 2)))
        self.engine = StockVLLM(
            write_model(directory / "model"),
            shape.blocks,
            block_size=shape.block_size,
            window=shape.window,
            others=shape.others,
            retention=shape.retention,
            runs_ahead=shape.runs_ahead,
            drafts=shape.drafts,
            tokens_per_step=self.rng.choice((16, 48)) if shape.chunked else 128,
            longest=self.longest,
            hashing=shape.hashing,
            chunked=shape.chunked,
            reserve_all=shape.reserve_all,
            by_priority=shape.by_priority,
            on_failure=shape.on_failure,
            eagle=shape.eagle,
            steps_in_flight=shape.in_flight,
            factors=shape.factors,
            additional={"kvcache": self._settings()} if recorded else {},
        )
        if shape.on_failure:
            connector = self.engine.scheduler.connector
            connector.rng = random.Random(seed)
            # Ahead of its outputs vLLM 0.32 can stop scheduling a request whose tokens it would compute again.
            connector.fails_in_steps = not (shape.runs_ahead and shape.on_failure == "recompute")
        self.kept = 0
        """Tokens that sessions have kept when further input came."""
        self.room = dict[str, int]()
        """Of the session that is open, how many tokens it may still get; one at most is open, lest all wait."""
        self._count_kept()
        self.known: dict[str, Any] = {}
        """All requests so far."""
        self.above: dict[bytes, bytes | None] = {}
        """By name of a block, that of the one before it."""
        self.attached = self.engine.attached
        assert (self.attached is not None) == recorded
        self.numbers, self.prompts = (
            0,
            [[self.rng.randrange(2) for _ in range(self.longest)] for _ in range(3)],
        )

    def _choose_shape(self, hybrid: bool) -> Shape:
        return shape_of(self.rng, hybrid=hybrid)

    def _settings(self) -> dict[str, Any]:
        return {"log": str(self.log), "settings": {"log": {"record_tokens": self.shape.record_tokens}}}

    def run(self) -> None:
        """All of it, compared after each step."""
        for _ in self.steps():
            self.seen["copies"] += compare(self.engine, self._can_be_found)
        self._compare_log()

    def _count_kept(self) -> None:
        scheduler = self.engine.scheduler
        update, blocks = (
            scheduler._update_request_as_session,
            scheduler.kv_cache_manager.coordinator.single_type_managers[0],
        )

        def counted(session: Any, *args: Any) -> None:
            self.kept += blocks.num_cached_block.get(session.request_id, 0) * blocks.block_size
            self.seen["continued"] += 1
            update(session, *args)

        scheduler._update_request_as_session = counted

    def steps(self) -> Iterator[None]:
        """Do one thing after another."""
        for _ in range(STEPS):
            self._act()
            yield
        self._end_session()
        yield
        for _ in range(MOST_STEPS):
            if not self.engine.step(self.rng):
                break
            yield
        else:
            raise AssertionError(f"not ended after {MOST_STEPS:,} more steps")
        self.engine.scheduler.shutdown()

    def _act(self) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self._add()
        elif chance < 0.36 and self.engine.scheduler.requests:
            self.seen["aborted"] += 1
            self.engine.abort(self.rng.choice(list(self.engine.scheduler.requests)))
        elif chance < 0.38:
            # With all preempted, as vLLM can if nothing is being loaded and no session waits, or only if there
            # is nothing to preempt.
            preempt = self.rng.random() < 0.5 and self.shape.on_failure is None and not self.room
            self.seen["reset"] += self.engine.scheduler.reset_prefix_cache(preempt)
        elif chance < 0.5 and self.room:
            self._continue_session()
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
        tokens = [*begin, *(rng.randrange(2) for _ in range(rng.randrange(1, 9)))][
            : longest - min(8, longest // 4 + 1)
        ]
        # The last of these is more than there can be.
        output = rng.randrange(1, max(2, min(40, longest - len(tokens) + 2)))
        skip = rng.random() < 0.1
        self.numbers += 1
        if skip:
            self.skipping.add(f"r{self.numbers}")
        name, room = f"r{self.numbers}", longest - len(tokens) - output
        is_session = (
            self.sessions
            and not self.room
            and self.shape.on_failure is None
            and room > 0
            and rng.random() < 0.5
        )
        if is_session:
            self.room[name] = room
            self.skipping.add(name)
        embeddings = None
        if not is_session and self.shape.embeddings and rng.random() < 0.3:
            embeddings = torch.tensor(tokens, dtype=torch.float16).unsqueeze(1).expand(-1, 4)
            self.seen["embeddings"] += 1
        self.engine.add(
            name,
            tokens,
            output,
            salt=rng.choice(SALTS),
            adapter=rng.choice(ADAPTERS),
            skip=skip,
            priority=rng.randrange(3),
            resumable=is_session,
            embeddings=embeddings,
        )
        self._learn_names()

    def _continue_session(self) -> None:
        (name,) = self.room
        more, output = self.rng.randrange(1, 9), self.rng.randrange(1, 9)
        left = self.room[name] - more - output
        if name not in self.engine.scheduler.requests:
            self.room.clear()
        elif left <= 0 or self.rng.random() < 0.2:
            self._end_session()
        else:
            self.room[name] = left
            tokens = [self.rng.randrange(2) for _ in range(more)]
            self.engine.add(name, tokens, output, resumable=True)
            self._learn_names()

    def _end_session(self) -> None:
        for name in self.room.keys() & self.engine.scheduler.requests.keys():
            self.engine.add(name, [0], 1)
        self.room.clear()

    def _learn_names(self) -> None:
        self.known |= self.engine.scheduler.requests
        for request in self.known.values():
            names = list(map(bytes, request.block_hashes))
            self.above.update(zip(names, [None, *names], strict=False))

    def _can_be_found(self, cached: Counter[bytes]) -> set[bytes]:
        """What of it can be found: where a load has failed something may be missing before it.

        In larger blocks than vLLM hashes the end of a prompt has a name that nobody asks for.
        """
        factor = self.shape.factors[0]
        if factor > 1:
            self._learn_names()
            full = {
                bytes(name)
                for each in self.known.values()
                for name in each.block_hashes[factor - 1 :: factor]
            }
            return cached.keys() & full
        if self.shape.on_failure != "fail":
            return set(cached)
        self._learn_names()
        return {name for name in cached if self._all_before(name) <= cached.keys()}

    def _all_before(self, name: bytes) -> set[bytes]:
        found, above = set[bytes](), self.above[name]
        while above is not None:
            found.add(above)
            above = self.above[above]
        return found

    def _compare_log(self) -> None:
        audit = compare_log(self.engine, self.log, self.kept)
        self.seen["loaded"] += audit.loaded
        self.seen["not loaded"] += audit.not_loaded
        # What of smaller blocks ends within those of full attention has no reason.
        explained = self.shape.on_failure is None and self.shape.factors[0] == 1
        if explained and self.shape.record_tokens:
            self._compare_reasons()
        self.seen["admitted"] += audit.requests
        ends = [
            each.why
            for batch in LogReader(self.log)
            for each in batch.events
            if isinstance(each, SequenceRemoved)
        ]
        self.seen["preempted"] += ends.count(EndReason.PREEMPTED)
        self.seen["invalidated"] += any(
            isinstance(each, BlocksRemoved) and each.why == RemoveReason.INVALIDATED
            for batch in LogReader(self.log)
            for each in batch.events
        )
        self.seen["refused"] += audit.refusals
        if self.shape.record_tokens and not self._shares_its_pool():
            then, roomy = play(self.log, [Trial({"primary_blocks": 5000})])
            assert then.tally.preempted == ends.count(EndReason.PREEMPTED)
            assert roomy.tally.requests == then.tally.requests
            assert roomy.tally.waited == roomy.tally.cut_short == 0
            self.seen["played"] += then.tally.requests
        self.seen["hits"] += audit.reused
        self.seen["ahead"] += self.shape.runs_ahead
        self.seen["priorities"] += self.shape.by_priority
        self.seen["sliding"] += self.shape.window is not None
        self.seen["drafts"] += self.shape.drafts > 0
        for kind in self.shape.others:
            self.seen[f"further {kind}"] += 1
        for batch in LogReader(self.log):
            for each in batch.events:
                if type(each).__module__ == "events.types":
                    self.seen[type(each).__name__] += 1

    def _shares_its_pool(self) -> bool:
        """Return whether there are further groups, whose logs are not played."""
        return any(isinstance(each, PoolShared) for batch in LogReader(self.log) for each in batch.events)

    def _compare_reasons(self) -> None:
        """Of what full attention had, all that was not reused had been lost in another group, as the log says.

        Or it is the last block of a hit, with EAGLE.
        """
        missed = _Missed(self.skipping)
        history = HistoryFold(missed)
        for batch in LogReader(self.log):
            history.fold(batch)
        assert missed.unexplained == 0, missed.unexplained
        self.seen["lost in a group"] += missed.lost_tokens
        self.seen["last of a hit"] += missed.last_tokens


class _Missed(HistoryListener):
    """Counts tokens that full attention had cached."""

    def __init__(self, skipping: set[str]) -> None:
        self._skipping = skipping
        self.unexplained = self.lost_tokens = self.last_tokens = 0

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Look at one."""
        if admission.request_id not in self._skipping:
            self.unexplained += int(admission.counts[Reason.NOT_REUSED])
            self.lost_tokens += int(admission.counts[Reason.NOT_SERVABLE])
            self.last_tokens += int(admission.counts[Reason.LAST_HIT])


RARE = {False: (53, 50), True: (20, 47)}
"""Programs, hybrid or not, that meet what few do, and so are always among them: blocks whose loading failed, prompts as
embeddings, the last block of a hit that is computed again, chunked attention."""


def place_of(error: BaseException) -> tuple[str, int | None]:
    """Return the file and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno


def place_without_recorder(seed: int, *, hybrid: bool) -> tuple[str, int | None] | None:
    """Return where the program ends vLLM as it is: some of them meet its assertions; None if it goes through."""
    with tempfile.TemporaryDirectory() as directory:
        program = Program(seed, Path(directory), recorded=False, hybrid=hybrid)
        try:
            for _ in program.steps():
                pass
        except Exception as error:
            return place_of(error)
    return None


def main(first: int, last: int, hybrid: bool) -> None:
    """Run these seeds."""
    register()
    seen = Counter[str]()
    for seed in (*range(first, last), *RARE[hybrid]):
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
            program = Program(seed, Path(directory), hybrid=hybrid)
            try:
                program.run()
            except BaseException as error:
                if place_of(error) == place_without_recorder(seed, hybrid=hybrid):
                    program.seen["failures of vLLM"] += 1
                else:
                    print(f"seed {seed}: {program.shape}", file=sys.stderr)
                    raise
        seen += program.seen
        seen["programs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "hybrid" in sys.argv[3:])
