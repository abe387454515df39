"""Beams, as branches of a sequence: A-1, A-2."""

from __future__ import annotations

import pytest

from kvcache.errors import DuplicateRequest, OutOfBlocks
from kvcache.inputs import Request
from tests.support.engines.rig import Rig


def branch(rig: Rig, name: str, beams: int) -> list[str]:
    """So many beams, the sequence itself among them."""
    names = [name, *(f"{name}.{number}" for number in range(1, beams))]
    for child in names[1:]:
        rig.manager.fork(name, child)
    return names


def test_a_1_beams_share_a_prompt_or_all_of_it_but_its_last_block() -> None:
    """Branches that begin before the last block is computed have one each, later ones share it; all come back."""
    rig = Rig(24, size=64, max_sequence_length=512)
    prompt = list(range(192))
    rig.add("unshared", prompt)
    rig.manager.store_context_blocks("unshared", 128)
    beams = branch(rig, "unshared", 8)
    assert rig.free == 24 - (2 + 8)
    assert len({rig.manager.block_table(beam).tolist()[2] for beam in beams}) == 8
    other = list(range(1000, 1192))
    rig.prefill("shared", other)
    shared = branch(rig, "shared", 8)
    assert rig.free == 24 - (2 + 8) - 3
    with pytest.raises(DuplicateRequest):
        rig.manager.fork("shared", "shared.1")
    before = rig.manager.fingerprint()
    with pytest.raises(OutOfBlocks):
        rig.manager.add_sequences([Request(n, list(range(n, n + 512))) for n in (2000, 3000)])
    assert rig.manager.fingerprint() == before
    rig.end(*beams, *shared)
    assert rig.free == 24


def test_a_2_beams_grow_each_by_itself() -> None:
    """Without reuse: 575 tokens in 4 beams share 8 blocks and have one each; two tokens later another one each."""
    rig = Rig(128, size=64, max_sequence_length=1024, enable_block_reuse=False)

    def beams_of(name: str) -> list[str]:
        rig.prefill(name, list(range(575)))
        return branch(rig, name, 4)

    beams = beams_of("a")
    assert rig.free == 116
    rig.manager.add_tokens(beams, [1, 2, 3, 4])
    assert rig.free == 116
    rig.manager.add_tokens(beams, [1, 2, 3, 4])
    assert rig.free == 112
    rig.end(*beams)
    assert rig.free == 128
    for number in range(8):
        beams = beams_of(str(number))
        rig.manager.add_tokens(beams, [1] * 4)
        rig.manager.add_tokens(beams, [1] * 4)
    assert rig.free == 0
    rig.manager.check()


def test_a_3_tokens_are_taken_back() -> None:
    """575 tokens, one more, one more, three more, and four taken back: the block that began with them is free again."""
    rig = Rig(80, size=64, max_sequence_length=1024)
    rig.prefill("a", list(range(575)))
    assert rig.free == 71
    rig.generate("a", 1)
    assert rig.free == 71
    rig.generate("a", 2)
    assert rig.free == 70
    rig.manager.add_tokens(["a"], [3, 4, 5], [3])
    assert rig.free == 70
    rig.manager.rewind("a", 576)
    # Theirs has 71 at once. Here the ninth block was cached when the tenth was begun: the last token goes into a copy
    # of it, and the cached one is free to be evicted, and counts as such.
    assert rig.free == 71
    rig.end("a")
    assert rig.free == 80
    rig.manager.check()
