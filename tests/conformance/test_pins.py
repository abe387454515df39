"""Pinned blocks: E-9, E-10, S-7."""

from __future__ import annotations

from kvcache.inputs import Request
from tests.support.engines.rig import Rig


def test_e_9_pinned_blocks_are_not_free_until_they_are_let_go_of() -> None:
    """A sequence ends, and what was pinned of it stays held."""
    rig = Rig(4, max_pinned_share=1.0)
    rig.prefill("a", list(range(8)))
    pin = rig.manager.pin("a")
    rig.end("a")
    assert rig.free < 4
    rig.manager.unpin(pin)
    assert rig.free == 4


def test_e_10_no_block_is_free_twice() -> None:
    """Two twins of one batch, one stored and gone, the other pinned: each block counts once throughout."""
    rig = Rig(6)
    tokens = list(range(8))
    rig.manager.add_sequences([Request("a", tokens), Request("b", tokens)])
    assert rig.free == 6 - 4
    rig.manager.store_context_blocks("a", 8)
    rig.end("a")
    assert rig.free == 6 - 2
    rig.manager.store_context_blocks("b", 8)
    pin = rig.manager.pin("b")
    # Theirs has only 4 free here: b keeps its own copies beside the cached ones. Ours holds a's, and gave its own back.
    assert rig.free == 6 - 2
    rig.manager.unpin(pin)
    assert rig.free == 6 - 2
    rig.end("b")
    assert rig.free == 6
    rig.manager.check()


def test_s_7_a_pinned_chain_of_a_sliding_window() -> None:
    """Stored, removed, added again, pinned: the pinned blocks stay until they are let go of."""
    rig = Rig(6, max_attention_window=(8,), max_pinned_share=1.0)
    tokens = list(range(1000, 1011))
    rig.prefill("a", tokens)
    rig.end("a", store=False)
    rig.prefill("b", tokens)
    pin = rig.manager.pin("b")
    rig.end("b")
    assert rig.free < 6
    rig.manager.unpin(pin)
    assert rig.free == 6
