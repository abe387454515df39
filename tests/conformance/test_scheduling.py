"""What schedulers ask before they admit: E-11, E-12. What is answered is what then happens."""

from __future__ import annotations

import pytest

from kvcache.inputs import Request
from tests.support.engines.rig import Rig, prompt


@pytest.mark.parametrize(("size", "blocks"), [(1, 1152), (64, 18)])
def test_e_11_blocks_of_a_request_up_to_its_end(size: int, blocks: int) -> None:
    """A prompt of 1024 tokens and 128 sampled ones: what is taken at once, and what is still needed."""
    rig = Rig(4096 // size, size=size, max_sequence_length=4096)
    assert rig.manager.scheduling.estimate_demand(Request("a", prompt(0, 1024)), 128).to_completion == {
        4096: blocks
    }
    rig.add("a", prompt(0, 1024))
    assert rig.used + rig.manager.scheduling.remaining_blocks_to_completion("a", 128) == blocks


def test_e_11_blocks_of_a_request_in_a_sliding_window() -> None:
    """With a window of 128 the prompt needs its 16 blocks, and after it most of them are given back."""
    rig = Rig(64, size=64, windows=(128,), max_sequence_length=4096)
    assert rig.manager.scheduling.estimate_demand(Request("a", prompt(0, 1024)), 128).to_completion == {
        128: 17
    }
    rig.add("a", prompt(0, 1024))
    # Theirs counts 18 blocks, as without a window. Here those that the window leaves behind count as given back, once
    # the prompt is stored: at the latest with the first token, which needs a block of its own before.
    assert (rig.used, rig.manager.scheduling.remaining_blocks_to_completion("a", 128)) == (16, 1)
    rig.manager.store_context_blocks("a", 1024)
    held = rig.used
    remaining = rig.manager.scheduling.remaining_blocks_to_completion("a", 128)
    assert held + remaining == 3  # as many as 128 tokens overlap at most
    most = held
    for _ in range(128):
        rig.go_on("a")
        most = max(most, rig.used)
    assert most == 3


class Case:
    """A prompt beside what is cached, with blocks of 16 tokens."""

    def __init__(self, tokens: list[int], *, reuse: bool = True) -> None:
        self.rig = Rig(256, size=16, max_sequence_length=512, enable_block_reuse=reuse)
        self.tokens = tokens

    def asked_and_taken(self, max_new_tokens: int) -> tuple[int, int, int, int]:
        """Full blocks that the prompt finds; then, with it admitted, tokens that it reuses, blocks that it takes of
        what was free, and all that it takes up to its end.
        """
        found, free = self.rig.manager.count_reusable(self.tokens), self.rig.free
        demand = self.rig.manager.scheduling.estimate_demand(Request("asked", self.tokens), max_new_tokens)
        reused = self.rig.add("asked", self.tokens)
        taken = free - self.rig.free
        remaining = self.rig.manager.scheduling.remaining_blocks_to_completion("asked", max_new_tokens)
        (answered,) = zip(*(each.values() for each in (demand.needed, demand.to_completion)), strict=True)
        assert (demand.reusable, demand.reused_tokens) == ({512: found}, reused)
        assert answered == (taken, taken + remaining)
        self.held = demand.held[512]
        return found, reused, taken, taken + remaining


def test_e_12_after_an_identical_request() -> None:
    """Of 64 tokens 48 are in full blocks that are reused; they are free, so admission takes them, too."""
    case = Case(prompt(0, 64))
    case.rig.prefill("a", case.tokens)
    case.rig.generate("a", *prompt(100, 132))
    case.rig.end("a")
    # Theirs estimates 48 tokens. The first 15 of the fourth block are copied as well.
    assert case.asked_and_taken(32) == (3, 63, 4, 6)
    assert case.held == 0


def test_e_12_alongside_an_identical_request() -> None:
    """Blocks that a running request holds are not taken of what is free: one block is, for the last token."""
    case = Case(prompt(0, 49))
    case.rig.prefill("a", case.tokens)
    assert case.asked_and_taken(0) == (3, 48, 1, 1)
    assert case.held == 3


def test_e_12_nothing_cached() -> None:
    """All four blocks are new."""
    assert Case(prompt(0, 64)).asked_and_taken(32) == (0, 0, 4, 6)


@pytest.mark.parametrize(("max_new_tokens", "in_all"), [(16, 5), (32, 6)])
def test_e_12_a_shared_start(max_new_tokens: int, in_all: int) -> None:
    """Of 64 tokens the first 32 are cached."""
    case = Case(prompt(0, 64))
    case.rig.run("a", [*prompt(0, 32), *prompt(200, 232)])
    assert case.asked_and_taken(max_new_tokens) == (2, 32, 4, in_all)


def test_e_12_a_longer_request() -> None:
    """80 tokens and 48 more: 64 of the prompt are in full blocks that are reused."""
    case = Case(prompt(0, 80))
    case.rig.run("a", case.tokens)
    assert case.asked_and_taken(48) == (4, 79, 5, 8)


def test_e_12_without_reuse() -> None:
    """As if nothing were cached."""
    case = Case(prompt(0, 64), reuse=False)
    case.rig.run("a", case.tokens)
    assert case.asked_and_taken(32) == (0, 0, 4, 6)
