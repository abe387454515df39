"""How tokens fill blocks: A-6, A-7."""

from __future__ import annotations

import pytest

from tests.support.engines.rig import Rig, prompt


def stored(rig: Rig) -> list[list[int]]:
    """The tokens of each block that was stored in this step."""
    return [
        [token["token_id"] for token in block["tokens"]]
        for event in rig.polled()
        if event["data"]["type"] == "stored"
        for block in event["data"]["blocks"]
    ]


def test_a_6_tokens_are_cut_into_blocks() -> None:
    """Ten tokens are two full blocks, and when the request ends, one of the two that are left."""
    rig = Rig(16, event_buffer_max_size=64)
    rig.prefill("a", prompt(0, 10))
    assert stored(rig) == [prompt(0, 4), prompt(4, 8)]
    rig.end("a")
    assert stored(rig) == [prompt(8, 10)]


def test_a_6_tokens_that_are_computed_are_cut_into_blocks() -> None:
    """Of ten tokens with seven computed, one block is full, and when the request ends, three tokens follow."""
    rig = Rig(16, event_buffer_max_size=64)
    rig.add("a", prompt(0, 10))
    rig.manager.store_context_blocks("a", 7)
    assert stored(rig) == [prompt(0, 4)]
    rig.end("a")
    assert stored(rig) == [prompt(4, 7)]


@pytest.mark.parametrize("reused", [0, 4])
@pytest.mark.parametrize(("length", "grown", "blocks"), [(2, 7, (1, 2)), (6, 15, (2, 4))])
def test_a_7_growth_does_not_depend_on_where_the_prompt_came_from(
    length: int, grown: int, blocks: tuple[int, int], reused: int
) -> None:
    """Whether a prompt's start is computed or found, it has as many blocks, and gets more at the same tokens.

    There is no connector that could bring it from outside; what is found in the cache is brought in the same sense.
    """
    rig = Rig(16)
    if reused:
        rig.run("before", prompt(0, reused))
    assert rig.prefill("a", prompt(0, length)) == min(reused, length - 1)
    sizes = [len(rig.table("a"))]
    for _ in range(length, grown):
        rig.go_on("a")
        sizes.append(len(rig.table("a")))
    assert (sizes[0], sizes[-1]) == blocks
    assert sizes == [-(-tokens // 4) for tokens in range(length, grown + 1)]
