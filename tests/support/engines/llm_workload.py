"""A model and its cache under a random workload, each logit beside those of the model without any cache.

The model is that of examples/tiny_llm.py, made so small that a step takes a millisecond, and computes in float64: the
pools are of float32, two elements of which hold one of float64. What it should compute is worked out from the weights
over all tokens at once, without pools, tables or chunks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

from cuda_ops.copier import CopyFailed
from kvcache import KVCacheManager, Layout, Request
from kvcache.errors import OutOfBlocks, UsageError
from kvcache.pools import Pools
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.examples import load

SIZE, LONGEST = 4, 32
"""Tokens of a block, and of a sequence."""
TOLERANCE = 1e-10
"""Of logits, which are about 1."""


class WrongAnswer(AssertionError):
    """The model computed something else than it does without a cache."""


def small_llm() -> Any:
    """The example, with two layers that differ in heads and window; windows of 6 tokens and of all."""
    llm = load("tiny_llm")
    llm.DIM, llm.HEADS, llm.HEAD_DIM, llm.HIDDEN, llm.VOCABULARY = 8, 2, 4, 8, 4
    llm.KV_HEADS, llm.WINDOWS = (1, 2), (6, 64)
    return llm


class WidePools:
    """Pools of float32 as those of float64, with half as many elements."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def kv(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(half.view(torch.float64) for half in self._pools.kv(layer))


class Dense:
    """The model without a cache: all tokens at once, each attending to those that its window has."""

    def __init__(self, llm: Any, model: Any) -> None:
        self._llm, self._model = llm, model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._computed(tokens)
        return self._known[key]

    @torch.no_grad()
    def _computed(self, tokens: list[int]) -> torch.Tensor:
        llm, model = self._llm, self._model
        state, positions = model.embedding[torch.tensor(tokens)], torch.arange(len(tokens))
        distance = positions[:, None] - positions
        for layer, heads, window in zip(model.layers, llm.KV_HEADS, llm.WINDOWS, strict=True):
            inner = rms_norm(state, (llm.DIM,))
            query = llm.rotated((inner @ layer["query"].T).view(-1, llm.HEADS, llm.HEAD_DIM), positions)
            key = llm.rotated((inner @ layer["key"].T).view(-1, heads, llm.HEAD_DIM), positions)
            value = (inner @ layer["value"].T).view(-1, heads, llm.HEAD_DIM)
            key, value = (each.repeat_interleave(llm.HEADS // heads, 1) for each in (key, value))
            products = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(llm.HEAD_DIM)
            products = products.masked_fill((distance < 0) | (distance >= window), -math.inf)
            seen = torch.einsum("hqk,khd->qhd", products.softmax(-1), value)
            state = state + seen.flatten(1) @ layer["out"].T
            inner = rms_norm(state, (llm.DIM,))
            state = state + (silu(inner @ layer["gate"].T) * (inner @ layer["up"].T)) @ layer["down"].T
        result: torch.Tensor = rms_norm(state, (llm.DIM,)) @ model.head.T
        return result


class Line:
    """A running sequence: its tokens, and how many of them are computed."""

    def __init__(self, name: str, tokens: list[int], computed: int) -> None:
        self.name, self.tokens, self.computed = name, tokens, computed

    @property
    def decodes(self) -> bool:
        return self.computed == len(self.tokens) - 1


class Step(NamedTuple):
    """What is computed of a line, the last tokens of which may be guesses; `draft`: those are in the cache already."""

    line: Line
    tokens: list[int]
    guesses: list[int]
    draft: bool


class Workload:
    """An engine that does by chance what engines do, with too little room for it."""

    def __init__(self, llm: Any, rng: random.Random, *, wrap: Any = None) -> None:
        self.llm, self.rng = llm, rng
        some = rng.randint
        primary, secondary = (some(8, 12), some(9, 14)), (some(0, 6), some(0, 10))
        config = llm.settings(
            max_sequence_length=LONGEST,
            tokens_per_block=SIZE,
            head_dim=2 * llm.HEAD_DIM,
            primary_blocks=primary,
            secondary_blocks=secondary,
            enable_partial_reuse=rng.random() < 0.8,
            debug_fill_blank=rng.random() < 0.5,
            debug_check_tables=True,
        )
        pools = Pools(Layout.of(config), "cpu")
        self.late = LateCopier(pools.copier(), rng.choice([0, 0, 2, 5]))
        self.fails = rng.random() < 0.2
        which = {some(0, 12) for _ in range(2)} if self.fails else set()
        copier = FailingCopier(self.late, which)
        self.manager = KVCacheManager(config, pools=pools, copier=copier if wrap is None else wrap(copier))
        self.primary = primary
        self.model = llm.Model(WidePools(pools), torch.float64)
        self.done = Counter[str]()
        """How often it did what."""
        self.lines: list[Line] = []
        self.texts: list[list[int]] = [[0, 1, 2, 3] * 2]
        self.preempted: list[list[int]] = []
        self._names = 0

    def run(self, steps: int, dense: Dense) -> None:
        """Do so many steps, and end everything."""
        self.dense = dense
        actions: list[Callable[[], None]] = [self._admit, self._admit, self._fork, self._rewind, self._end]
        for _ in range(steps):
            for act in self.rng.choices(actions, k=self.rng.randint(1, 3)):
                act()
            self._compute()
            self.late.tick()
            self.manager.flush()
            self._receive()
        while self.lines:
            self._end()
        self.manager.flush()
        self.manager.check()
        assert self.manager.num_sequences == 0
        self.manager.close()

    # -- what comes and goes

    def _name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def _some_tokens(self, most: int) -> list[int]:
        return self.rng.choices(range(self.llm.VOCABULARY), k=self.rng.randint(1, most))

    def _admit(self) -> None:
        """A prompt that begins as an earlier text did, or one that comes back."""
        resumed = bool(self.preempted) and self.rng.random() < 0.6
        if resumed:
            tokens = self.preempted.pop(0)
        else:
            text = self.rng.choice(self.texts)
            tokens = (text[: self.rng.randint(0, len(text))] + self._some_tokens(8))[: LONGEST - 8]
        request = Request(self._name(), tokens, resumed=resumed)
        if not self.manager.can_add([request]):
            self.preempted += [tokens] * resumed
            return
        (admitted,) = self.manager.add_sequences([request])
        self.lines.append(Line(str(request.request_id), list(tokens), admitted.reused_tokens))
        self.texts.append(list(tokens))
        self.done["resume"] += resumed

    def _end(self) -> None:
        if self.lines and self._copied():
            line = self.lines.pop(self.rng.randrange(len(self.lines)))
            self.texts = [*self.texts[-6:], line.tokens]
            self.manager.remove_sequence(line.name, store=self.rng.random() < 0.9)

    def _preempt(self) -> None:
        line = self.lines.pop()
        self.manager.remove_sequence(line.name, why="preempted")
        self.preempted.append(line.tokens)
        self.done["preempt"] += 1

    def _fork(self) -> None:
        line = self._any_ready()
        if line is not None:
            name = self._name()
            try:
                self.manager.fork(line.name, name)
            except OutOfBlocks:
                self._preempt()
            else:
                self.lines.append(Line(name, list(line.tokens), line.computed))
                self.done["fork"] += 1

    def _rewind(self) -> None:
        line = self._any_ready()
        if line is not None:
            number = self.rng.randint(1, len(line.tokens))
            try:
                self.manager.rewind(line.name, number)
            except (OutOfBlocks, UsageError):  # a window may have let go of what the token sees
                return
            if number < len(line.tokens):
                line.tokens, line.computed = line.tokens[:number], number - 1
                self.done["rewind"] += 1

    def _any_ready(self) -> Line | None:
        """A sequence that decodes, and whose blocks are there."""
        ready = [line for line in self.lines if line.decodes]
        return self.rng.choice(ready) if ready and self._copied() else None

    # -- a step

    def _compute(self) -> None:
        """A batch of chunks, next tokens and guesses, all of it compared."""
        chosen = [self._chosen(line) for line in list(self.lines) if self.rng.random() < 0.8]
        steps = [step for step in chosen if step is not None and step.line in self.lines]
        if not steps or not self._copied():
            return
        parts = [self.llm.Part(step.line.name, step.tokens, step.line.computed) for step in steps]
        found = torch.split(self.model.forward(self.manager, parts), [len(step.tokens) for step in steps])
        for step, logits in zip(steps, found, strict=True):
            line = step.line
            whole = [*line.tokens[: line.computed], *step.tokens]
            if not (logits - self.dense.logits(whole)[line.computed :]).abs().max() < TOLERANCE:
                raise WrongAnswer(f"{line.name} at {line.computed} of {len(line.tokens)}")
        for step, logits in zip(steps, found, strict=True):
            if step.line in self.lines:
                self._reported(step, logits)

    def _chosen(self, line: Line) -> Step | None:
        """A chunk, or the next token with or without guesses."""
        if line not in self.lines:  # has made room
            return None
        left = line.tokens[line.computed :]
        if len(left) > 1 and self.rng.random() < 0.5:
            return Step(line, left[: self.rng.randint(1, len(left) - 1)], [], draft=False)
        draft, guesses = self.rng.random() < 0.5, self._some_tokens(4)
        if not line.decodes or self.rng.random() < 0.6:
            return Step(line, left, [], draft=False)
        try:
            if draft and not self._copied():
                return None
            if draft:
                self.manager.add_tokens([line.name], guesses, [len(guesses)], draft=True)
            else:
                self.manager.reserve([line.name], [len(guesses)])
        except OutOfBlocks:
            self._preempt()
            return None
        return Step(line, left + guesses, guesses, draft)

    def _reported(self, step: Step, logits: torch.Tensor) -> None:
        """Tell the cache what was computed, and sample, now and then what is likely."""
        line, after = step.line, step.line.computed + len(step.tokens) - len(step.guesses)
        if after < len(line.tokens):
            line.computed = after
            self.manager.store_context_blocks(line.name, after)
            self.done["chunk"] += 1
            return
        self.done["draft" if step.draft else "guess"] += bool(step.guesses)
        if not step.draft:
            self.manager.store_context_blocks(line.name, after)
        taken = self.rng.randint(0, len(step.guesses))
        greedy = int(logits[len(logits) - 1 - len(step.guesses) + taken].argmax())
        sampled = self.rng.choice([greedy, self.rng.randrange(self.llm.VOCABULARY)])
        accepted = step.guesses[:taken]
        try:
            if step.draft:
                if taken < len(step.guesses):
                    self.manager.rewind(line.name, len(line.tokens) + taken)
                line.tokens += accepted
                if not self._copied():
                    return
                self.manager.add_tokens([line.name], [sampled])
                line.tokens.append(sampled)
            else:
                self.manager.add_tokens([line.name], [*accepted, sampled], [taken + 1])
                line.tokens += [*accepted, sampled]
        except OutOfBlocks:
            self.lines.remove(line)
            self.manager.remove_sequence(line.name, why="preempted")
            self.preempted.append(line.tokens)
            return
        line.computed = len(line.tokens) - 1
        if len(line.tokens) > LONGEST - 8:
            self.lines.remove(line)
            self.manager.remove_sequence(line.name)

    # -- copies

    def _copied(self) -> bool:
        """Start what is to be copied, and let the step wait for it; False if a copy has failed."""
        ticket = self.manager.start_transfers()
        if ticket is None:
            return True
        if not self.fails and self.rng.random() < 0.7:
            ticket.wait_on()
            self.done["late"] += self.late.waiting > 0
            return True
        try:
            ticket.wait()
        except CopyFailed:
            self._receive()
            return False
        return True

    def _receive(self) -> None:
        """Requests that a failed copy has cut begin again."""
        cut = dict(self.manager.poll().invalidated)
        self.done["cut"] += len(cut)
        for line in [line for line in self.lines if line.name in cut]:
            self.lines.remove(line)
            self.manager.remove_sequence(line.name, store=False)
            self.preempted.append(line.tokens)
