"""A language model served from the cache: a small Llama with random weights, in plain torch on a CPU.

    python examples/tiny_llm.py [--debug]

Layers differ in KV heads and windows. Each step computes the next token of all that decode, a few guessed ones behind
it (`reserve`), and a chunk of a prompt. Several answers to one prompt branch (`fork`), the youngest makes room, what is
evicted moves to host memory; a log and a feed for routers are on. --debug finds tables and K/V that are used wrongly.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

from cuda_ops.attention import PagedKV, attend, write
from kvcache import KVCacheConfig, KVCacheManager, Layout, Request, replay
from kvcache.errors import OutOfBlocks
from kvcache.pools import Pools

DIM, HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 128, 8, 16, 256, 1024
KV_HEADS, WINDOWS = (2, 4, 2, 4), (64, 1024, 64, 1024)
CHUNK, GUESSES, BATCH = 128, 3, 8
"""Tokens of a prompt that a step computes, guessed tokens of each sequence, and requests that run at once."""


def settings(**more: object) -> KVCacheConfig:
    """A cache for this model."""
    sizes = {"max_sequence_length": 1024, "primary_blocks": (48, 64), "secondary_blocks": (48, 128)}
    shape = {"num_layers": len(WINDOWS), "num_kv_heads": KV_HEADS, "max_attention_window": WINDOWS}
    kept = {"tokens_per_block": 16, "head_dim": HEAD_DIM, "dtype": "float32"}
    return KVCacheConfig.model_validate({**sizes, **shape, **kept, **more})


class Part(NamedTuple):
    """What a step computes of one sequence, from a position on."""

    name: str
    tokens: list[int]
    start: int


class Model:
    """Four layers of attention and a feed-forward network. K and V lie in the pools."""

    def __init__(self, pools: Pools, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        weights = partial(torch.randn, generator=make, dtype=dtype)
        self.pools = pools
        self.embedding = weights(VOCABULARY, DIM)
        self.layers = []
        for heads in KV_HEADS:
            shapes = {"query": (HEADS * HEAD_DIM, DIM), "key": (heads * HEAD_DIM, DIM)}
            shapes |= {"value": (heads * HEAD_DIM, DIM), "out": (DIM, HEADS * HEAD_DIM)}
            shapes |= {"gate": (HIDDEN, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
            self.layers.append({name: weights(shape) / math.sqrt(shape[1]) for name, shape in shapes.items()})
        self.head = weights(VOCABULARY, DIM) / math.sqrt(DIM)

    @torch.no_grad()
    def forward(self, manager: KVCacheManager, parts: list[Part]) -> torch.Tensor:
        """Logits of all tokens of a step, [tokens, vocabulary]; their K and V are in the cache afterwards."""
        names, counts = [part.name for part in parts], [len(part.tokens) for part in parts]
        starts = [part.start for part in parts]
        stops = [start + count for start, count in zip(starts, counts, strict=True)]
        given, slots, tables = manager.tables, {}, {}
        for window in set(WINDOWS):
            slots[window] = torch.as_tensor(given.slot_mapping(names, window, starts=starts, stops=stops))
            tables[window] = torch.as_tensor(given.padded(names, window))
        given.check(*slots.values(), *tables.values())
        positions = torch.cat([torch.arange(*row) for row in zip(starts, stops, strict=True)])
        state = self.embedding[torch.tensor([token for part in parts for token in part.tokens])]
        for number, (layer, heads, window) in enumerate(zip(self.layers, KV_HEADS, WINDOWS, strict=True)):
            inner = rms_norm(state, (DIM,))
            query, key = (
                rotated((inner @ layer[name].T).view(-1, count, HEAD_DIM), positions)
                for name, count in (("query", HEADS), ("key", heads))
            )
            kv = PagedKV(*self.pools.kv(number))
            write(kv, slots[window], key, (inner @ layer["value"].T).view(-1, heads, HEAD_DIM))
            seen = attend(query, kv, tables[window], stops, counts, window=window)
            state = state + seen.reshape(-1, HEADS * HEAD_DIM) @ layer["out"].T
            inner = rms_norm(state, (DIM,))
            state = state + (silu(inner @ layer["gate"].T) * (inner @ layer["up"].T)) @ layer["down"].T
        return rms_norm(state, (DIM,)) @ self.head.T


def rotated(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, dim] at these positions."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=heads.dtype) / half)
    cos, sin = (wave[:, None].to(heads.dtype) for wave in (angles.cos(), angles.sin()))
    first, second = heads.split(half, dim=-1)  # type: ignore[no-untyped-call]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(eq=False)
class Answer:
    """A request, or one of several answers to it."""

    name: str
    tokens: list[int]
    final_length: int
    answers: int = 1
    temperature: float = 0.0
    computed: int = 0
    tokens_with_slots: int = 0
    resumed: bool = False
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0  # seconds, until its first token came

    def __post_init__(self) -> None:
        self._draws = torch.Generator().manual_seed(sum(map(ord, self.name)))

    def sample(self, logits: torch.Tensor) -> int:
        """The next token: the most likely one, or drawn with the request's own seed."""
        if not self.temperature:
            return int(logits.argmax())
        return int(torch.multinomial((logits / self.temperature).softmax(-1), 1, generator=self._draws))

    def guess(self, most: int) -> list[int]:
        """What followed the last token before: prompt lookup. Nothing where tokens are drawn."""
        most = min(most, self.final_length - len(self.tokens) - 1)
        if self.temperature or most <= 0:
            return []
        before = (at for at in range(len(self.tokens) - 2, -1, -1) if self.tokens[at] == self.tokens[-1])
        return self.tokens[(at := next(before, len(self.tokens)) + 1) : at + most]


class Answers:
    """The requests that run: how they go on when a step is computed, and who makes room for others."""

    def __init__(self, manager: KVCacheManager, model: Model) -> None:
        self.manager, self.model = manager, model
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self.done: dict[str, Answer] = {}
        self.preempted = self.accepted = 0

    def advance(self, answer: Answer, part: Part, logits: torch.Tensor) -> None:
        """Note what is computed; behind the last token sample, as long as the guesses were right."""
        known = len(answer.tokens)
        if part.start + len(part.tokens) < known:
            answer.computed = part.start + len(part.tokens)
            self.manager.store_context_blocks(answer.name, answer.computed)
            return
        guesses, sampled = part.tokens[known - part.start :], list[int]()
        for row in logits[known - 1 - part.start :]:
            sampled.append(answer.sample(row))
            if sampled != guesses[: len(sampled)]:
                break
        self.accepted += len(sampled) - 1
        answer.waited = answer.waited or time.perf_counter() - answer.started
        self.manager.store_context_blocks(answer.name, known)
        while answer.answers > 1 and self._branch(answer, logits[known - 1 - part.start]):
            answer.answers -= 1
        self._append(answer, sampled)

    def _branch(self, answer: Answer, logits: torch.Tensor) -> bool:
        """Another answer to the same prompt, which shares its blocks; False if there is no room for it."""
        name = f"{answer.name}/{answer.answers - 1}"
        if not self._have_room(answer, partial(self.manager.fork, answer.name, name)):
            return False
        self._copy()
        branch = replace(answer, name=name, tokens=answer.tokens[:], answers=1)
        self.running.append(branch)
        self._append(branch, [branch.sample(logits)])
        return True

    def _append(self, answer: Answer, sampled: list[int]) -> None:
        grow = partial(self.manager.add_tokens, [answer.name], sampled, [len(sampled)])
        if not self._have_room(answer, grow):
            return
        answer.tokens += sampled
        answer.computed = len(answer.tokens) - 1
        if len(answer.tokens) >= answer.final_length:
            self.manager.remove_sequence(answer.name)
            self.running.remove(answer)
            self.done[answer.name] = answer

    def _have_room(self, answer: Answer, call: Callable[[], object]) -> bool:
        """Do something for an answer, for which others make room; False if it has had to make room itself."""
        while answer in self.running:
            with suppress(OutOfBlocks):
                call()
                return True
            self._preempt()
        return False

    def _preempt(self) -> None:
        if len(self.running) == 1:
            raise RuntimeError("the cache is too small for a single request")
        youngest = self.running.pop()
        self.manager.remove_sequence(youngest.name, why="preempted")
        youngest.resumed, self.preempted = True, self.preempted + 1
        self.waiting.appendleft(youngest)

    def _copy(self) -> None:
        if (ticket := self.manager.start_transfers()) is not None:
            ticket.wait()


class Engine(Answers):
    """Serves requests step by step."""

    def submit(self, name: str, prompt: list[int], output: int, **how: float) -> None:
        """Queue a request."""
        self.waiting.append(Answer(name, list(prompt), len(prompt) + output, **how))  # type: ignore[arg-type]

    def run(self) -> None:
        """Serve all that wait."""
        while self.waiting or self.running:
            self._step()

    def _step(self) -> None:
        """Admit, choose what to compute, have slots for it, compute it, and tell the cache what came of it."""
        self._admit()
        parts = self._parts()
        self._copy()
        logits = self.model.forward(self.manager, parts)
        if logits.isnan().any():
            raise RuntimeError("K/V was read that nobody has written")
        for part, rows in zip(parts, torch.split(logits, [len(part.tokens) for part in parts]), strict=True):
            for answer in [each for each in self.running if each.name == part.name]:
                self.advance(answer, part, rows)
        self.manager.flush()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < BATCH:
            answer = self.waiting[0]
            request = Request(answer.name, answer.tokens, reserve_tokens=CHUNK, resumed=answer.resumed)
            if not self.manager.can_add([request]):
                return
            answer.computed = self.manager.add_sequences([request])[0].reused_tokens
            answer.tokens_with_slots = min(answer.computed + CHUNK, len(answer.tokens))
            self.running.append(self.waiting.popleft())

    def _parts(self) -> list[Part]:
        parts, reserved, room = list[Part](), dict[str, int](), CHUNK
        for answer in self.running:
            tokens = answer.tokens[answer.computed : answer.computed + max(room, 1)]
            if len(answer.tokens) == answer.computed + 1:
                tokens += answer.guess(GUESSES)
                reserved[answer.name] = len(tokens) - 1
            elif not room:
                continue
            else:
                room -= len(tokens)
                if answer.computed + len(tokens) > answer.tokens_with_slots:
                    reserved[answer.name] = len(tokens)
                    answer.tokens_with_slots = answer.computed + len(tokens)
            parts.append(Part(answer.name, tokens, answer.computed))
        try:
            self.manager.reserve(list(reserved), list(reserved.values()))
        except OutOfBlocks:
            self._preempt()
            return self._parts()
        return parts


def main() -> None:
    """Serve a few conversations that begin alike, the first of them again at the end."""
    make = torch.Generator().manual_seed(1)
    system, *turns = (torch.randint(VOCABULARY, (n,), generator=make).tolist() for n in (600, *[40] * 12))
    config = settings(**dict.fromkeys(("debug_fill_blank", "debug_check_tables"), "--debug" in sys.argv))
    pools = Pools(Layout.of(config), "cpu")
    with TemporaryDirectory() as log:
        with KVCacheManager(config, pools=pools, log=log, sinks=["zmq+pub://127.0.0.1:0"]) as manager:
            engine = Engine(manager, Model(pools))
            engine.submit("to warm up", turns[1] * 4, 24)
            engine.run()
            engine.submit("alone", system + turns[0], 24)
            engine.run()
            for number, turn in enumerate(turns):
                engine.submit(f"chat {number}", system + turn, 24)
            engine.submit("several", system, 24, answers=4, temperature=0.8)
            engine.run()
            engine.submit("again", system + turns[0], 24)
            engine.run()
            stats, fingerprint = manager.stats(), manager.fingerprint()
        print("the log replays to the same state:", replay.replay(log).fingerprint == fingerprint)
    alone, again = engine.done["alone"], engine.done["again"]
    assert again.tokens == alone.tokens
    print(f"{len(engine.done)} answers, {engine.preempted} preemptions, {engine.accepted} right guesses")
    print(f"{stats.reused_tokens} prompt tokens reused; blocks: {stats.blocks_copied} copied,", end=" ")
    print(f"{stats.blocks_offloaded} moved to host memory, {stats.blocks_onboarded} back")
    print("seconds to the first token without and with reuse:", *(round(x.waited, 3) for x in (alone, again)))


if __name__ == "__main__":
    main()
