"""What a model computes on reused, copied, moved and branched K/V, beside the same computed anew: equal bit by bit.

The model is the example's. A run without the cache cuts its prompt where reuse ended, so that every product has the
same shape; then nothing but K/V in the wrong place can make a difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuda_ops.copier import Copier
from kvcache import KVCacheManager, Layout
from kvcache.calls.tables import BlockTables
from kvcache.pools import Pools
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.examples import load

LLM = load("tiny_llm")
LONG = 150
"""Tokens of a prompt: more than two windows, and not whole blocks."""


def prompt(seed: int, length: int = LONG) -> list[int]:
    return random.Random(seed).choices(range(LLM.VOCABULARY), k=length)


class Rig:
    """A cache and the model on it, one sequence at a time."""

    def __init__(self, wrap: Callable[[Copier], Copier] = lambda copier: copier, **settings: Any) -> None:
        config = LLM.settings(**settings)
        pools = Pools(Layout.of(config), "cpu")
        self.copier = wrap(pools.copier())
        self.manager = KVCacheManager(config, pools=pools, copier=self.copier)
        self.model = LLM.Model(pools)

    def add(self, name: str, tokens: list[int], **how: Any) -> int:
        """Returns how many tokens are reused."""
        return self.manager.add_sequence(name, tokens, **how).reused_tokens

    def compute(self, name: str, tokens: list[int], start: int, stop: int) -> torch.Tensor:
        """Logits of a part of a sequence's tokens."""
        ticket = self.manager.start_transfers()
        if ticket is not None:
            ticket.wait_on()
        logits: torch.Tensor = self.model.forward(self.manager, [LLM.Part(name, tokens[start:stop], start)])
        self.manager.store_context_blocks(name, stop)
        return logits

    def serve(self, name: str, tokens: list[int], *cuts: int) -> torch.Tensor:
        """Admit a request and compute its prompt from where reuse ends; returns the logits of the last part."""
        start, *starts = self.add(name, tokens), *cuts
        for stop in starts:
            self.compute(name, tokens, start, stop)
            start = stop
        return self.compute(name, tokens, start, len(tokens))


def anew(tokens: list[int], *cuts: int) -> torch.Tensor:
    """The same without reuse: the logits of the part behind the last cut."""
    return Rig(enable_block_reuse=False).serve("anew", tokens, *cuts)


def test_full_reuse() -> None:
    """All full blocks of a prompt are reused."""
    rig, tokens = Rig(), prompt(1)
    rig.serve("first", tokens, 64)
    assert rig.add("second", tokens) == 144
    found = rig.compute("second", tokens, 144, LONG)
    assert torch.equal(found, anew(tokens, 64, 144))


def test_partial_reuse_copies() -> None:
    """Of the last block only the beginning matches, and is copied."""
    rig, tokens = Rig(), prompt(1)
    rig.serve("first", tokens, 64, 101)
    other = [*tokens[:101], *prompt(2, 30)]
    assert rig.add("second", other) == 101
    found = rig.compute("second", other, 101, len(other))
    assert rig.manager.stats().blocks_copied == 0  # nothing is told before the step ends
    rig.manager.flush()
    assert rig.manager.stats().blocks_copied == 2
    assert torch.equal(found, anew(other, 64, 101))


def late(copier: Copier) -> Copier:
    """The host hears late of copies."""
    return LateCopier(copier, 5)


@pytest.mark.parametrize("wrap", [lambda copier: copier, late])
def test_offload_and_onboard(wrap: Callable[[Copier], Copier]) -> None:
    """A prompt moves to host memory while others are served, and back."""
    rig, tokens = Rig(wrap, primary_blocks=(12, 12), enable_partial_reuse=False), prompt(1)
    rig.serve("first", tokens, 64)
    rig.manager.remove_sequence("first")
    rig.serve("other", prompt(3), 64)
    rig.manager.remove_sequence("other")
    found = rig.serve("second", tokens)
    rig.manager.flush()
    assert rig.manager.stats().blocks_onboarded > 0
    assert torch.equal(found, anew(tokens, 64, 144))


def test_fork_and_rewind() -> None:
    """A branch, and a sequence whose last tokens were taken back, go on as if they had been alone."""
    rig, tokens = Rig(), prompt(1)
    rig.serve("a", tokens, 64)
    rig.manager.add_tokens(["a"], [7])
    rig.manager.fork("a", "b")
    for name, more in (("a", [1, 2]), ("b", [3, 4])):
        own = [*tokens, 7, *more]
        for place, token in enumerate(more, LONG):
            rig.compute(name, own, place, place + 1)
            rig.manager.add_tokens([name], [token])
        found = rig.compute(name, own, LONG + 2, LONG + 3)
        assert torch.equal(found, anew(own, 64, LONG, LONG + 1, LONG + 2))
    rig.manager.rewind("a", LONG)
    changed = [*tokens, 9, 10]
    rig.manager.add_tokens(["a"], [9, 10], [2], draft=True)
    found = rig.compute("a", changed, LONG - 1, LONG + 2)
    assert torch.equal(found, anew(changed, 64, LONG - 1))


def test_preempt_and_return() -> None:
    """It comes back with its tokens, and reuses what it had computed."""
    rig, tokens = Rig(enable_partial_reuse=False), prompt(1)
    rig.serve("a", tokens, 64)
    rig.manager.add_tokens(["a"], [5])
    rig.compute("a", [*tokens, 5], LONG, LONG + 1)
    rig.manager.remove_sequence("a", why="preempted")
    returned = [*tokens, 5, 6]
    assert rig.add("a", returned, resumed=True) == 144
    found = rig.compute("a", returned, 144, LONG + 2)
    assert torch.equal(found, anew(returned, 64, 144))


def test_failed_copies_begin_again() -> None:
    """The copy back fails: the sequence hears of it, computes all anew, and nothing wrong is reused."""
    tokens = prompt(1)
    rig = Rig(
        lambda copier: FailingCopier(copier, range(1, 3)), primary_blocks=(12, 12), enable_partial_reuse=False
    )
    rig.serve("first", tokens, 64)
    rig.manager.remove_sequence("first")
    rig.serve("other", prompt(3), 64)
    rig.manager.remove_sequence("other")
    rig.add("second", tokens)
    rig.manager.start_transfers()
    assert rig.manager.poll().invalidated
    rig.manager.remove_sequence("second", store=False)
    found = rig.serve("third", tokens, 64, 144)
    assert torch.equal(found, anew(tokens, 64, 144))


@pytest.mark.parametrize(
    "mutate", ["shift a table", "swap K and V", "window one token short", "reuse the last token"]
)
def test_what_is_wrong_shows(mutate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these changes the logits: the tests above would notice. New blocks do not hold old bytes by chance."""
    rig, tokens = Rig(enable_partial_reuse=False, debug_fill_blank=True), prompt(1)
    rig.serve("first", tokens, 64)
    rig.manager.remove_sequence("first")
    reused = rig.add("second", tokens)
    if mutate == "shift a table":
        padded = BlockTables.padded
        monkeypatch.setattr(
            BlockTables,
            "padded",
            lambda *of, **how: padded(*of, **how).roll(1, dims=-1),  # type: ignore[attr-defined]
        )
    elif mutate == "swap K and V":
        kv = Pools.kv
        monkeypatch.setattr(Pools, "kv", lambda pools, layer: kv(pools, layer)[:: -1 if layer == 2 else 1])
    elif mutate == "window one token short":
        attend = LLM.attend
        short = {64: 63}
        monkeypatch.setattr(
            LLM,
            "attend",
            lambda *of, window, **how: attend(*of, window=short.get(window, window), **how),
        )
    start = reused + (mutate == "reuse the last token")
    found = rig.compute("second", tokens, start, LONG)
    assert not torch.equal(found[-1], anew(tokens, 64, 144)[-1])


def test_nothing_wrong_shows_nothing() -> None:
    """The same without a mistake: equal."""
    rig, tokens = Rig(enable_partial_reuse=False, debug_fill_blank=True), prompt(1)
    rig.serve("first", tokens, 64)
    rig.manager.remove_sequence("first")
    found = rig.compute("second", tokens, rig.add("second", tokens), LONG)
    assert torch.equal(found[-1], anew(tokens, 64, 144)[-1])


def test_tokens_that_were_reported_and_not_written_show_as_nan() -> None:
    """With `debug_fill_blank` a model that reads them yields NaN, which the example's engine refuses."""
    rig, tokens = Rig(debug_fill_blank=True), prompt(1)
    rig.serve("first", tokens[:40])
    rig.add("second", tokens[60:100])
    ticket = rig.manager.start_transfers()
    assert ticket is not None
    ticket.wait_on()
    rig.manager.store_context_blocks("second", 40)  # and nothing was computed
    assert rig.add("third", tokens[60:110]) == 32
    assert rig.compute("third", tokens[60:110], 32, 50).isnan().all()
    engine = LLM.Engine(rig.manager, rig.model)
    engine.submit("fourth", tokens[60:120], 3)
    with pytest.raises(RuntimeError, match="nobody has written"):
        engine.run()
