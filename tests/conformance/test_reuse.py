"""What a prompt reuses: R-1 to R-6, R-9, R-12, R-13."""

from __future__ import annotations

from kvcache.inputs import MultimodalItem
from tests.support.engines.rig import Rig, prompt

SPECIAL = [*prompt(100, 106), 0, 1, 2]
"""Nine tokens, of which a request says more than what they are."""
EXTRA = [1, 1, 2, 2, 3, 3, 0, 0, 0]
"""Extra ids of them."""
ALL_OTHERS = [4, 4, 5, 5, 6, 6, 0, 0, 0]
"""Other ones from the first block on."""
OTHERS_AFTER = [1, 1, 2, 2, 4, 4, 0, 0, 0]
"""Other ones from the second block on."""


def test_r_1_blocks_are_reused_in_full_and_in_part() -> None:
    """Prompts that begin alike share full blocks; of the block where they part, what is equal is copied."""
    rig = Rig(8)
    assert rig.prefill(0, prompt(0, 9)) == 0
    first = rig.table(0)
    rig.generate(0, 9, 10)
    assert rig.table(0) == first
    assert rig.used == 3
    rig.end(0)
    assert (rig.used, rig.free) == (0, 8)

    assert rig.prefill(1, prompt(0, 9)) == 8
    second = rig.table(1)
    assert second[:2] == first[:2]
    assert second[2] not in first
    rig.generate(1, 9, 10)
    rig.end(1)

    assert rig.prefill(10, prompt(0, 10)) == 9
    # Theirs reuses 8: request 10 has taken the cached block [8, 9] for itself. A copy leaves its source cached.
    assert rig.prefill(11, prompt(0, 11)) == 10
    assert rig.table(10)[:2] == rig.table(11)[:2] == first[:2]
    rig.generate(11, 10)
    assert rig.used == 4
    rig.end(10)
    assert rig.used == 3
    rig.end(11)
    assert rig.used == 0


def test_r_1_prompts_that_part_from_what_is_cached() -> None:
    """Shorter and other prompts: who stores nothing leaves nothing, and one equal token is enough to be copied."""
    rig = Rig(8)
    rig.prefill(0, prompt(0, 11))
    rig.end(0)
    assert rig.prefill(1, prompt(0, 5)) == 4
    rig.generate(1, 5)
    assert rig.used == 2
    assert rig.prefill(2, [*prompt(0, 10), 11]) == 10
    rig.generate(2, 5)
    assert rig.used == 4
    assert rig.table(1)[0] == rig.table(2)[0]
    rig.end(1, 2)

    # Theirs ends a request with fewer tokens than it has, so that its last block is not stored; here nothing is.
    assert rig.add(3, [*prompt(0, 10), 12]) == 10
    rig.end(3, store=False)
    # Theirs reuses 9 by now: what was copied from is taken, and the request that took it has stored nothing.
    assert rig.prefill(4, [*prompt(0, 10), 12]) == 10
    rig.end(4)

    assert rig.prefill(5, [0] * 31) == 1
    assert (rig.used, rig.free) == (8, 0)
    rig.end(5)
    assert rig.prefill(6, [0]) == 0
    assert rig.used == 1


def test_r_2_tokens_with_other_extra_ids_are_other_tokens() -> None:
    """Reuse ends at the block in which the first extra id differs."""
    rig = Rig(16)
    rig.prefill(0, SPECIAL, extra_ids=EXTRA)
    first = rig.table(0)
    rig.generate(0, 3, 4)
    rig.end(0)
    assert rig.run(1, SPECIAL, extra_ids=EXTRA) == 8
    assert rig.prefill(2, SPECIAL, extra_ids=EXTRA) == 8
    assert rig.prefill(3, [*SPECIAL, 3, 4], extra_ids=[*EXTRA, 0, 0]) == 10
    assert rig.table(2)[:2] == rig.table(3)[:2] == first[:2]
    assert rig.used == 4
    rig.end(2, 3)
    assert rig.prefill(4, SPECIAL, extra_ids=ALL_OTHERS) == 0
    assert rig.prefill(5, SPECIAL, extra_ids=OTHERS_AFTER) == 4
    assert rig.table(5)[0] == first[0]
    assert rig.used == 6


def test_r_3_an_item_is_reused_as_itself_only() -> None:
    """Equal placeholders of another image are other tokens; what is before the image, or equal in it, is reused."""
    one, other = b"1" * 32, b"2" * 32
    whole = [MultimodalItem(one, 2, 4)]
    rig = Rig(16)
    rig.prefill(0, SPECIAL, multimodal=whole)
    first = rig.table(0)
    rig.end(0)
    assert rig.run(1, SPECIAL, multimodal=whole) == 8
    # Theirs reuses nothing: it copies no part of a block with an item. The two tokens before it are the same.
    assert rig.prefill(2, SPECIAL, multimodal=[MultimodalItem(other, 2, 4)]) == 2
    assert rig.prefill(3, SPECIAL, multimodal=[MultimodalItem(one, 2, 2), MultimodalItem(other, 4, 2)]) == 4
    assert rig.table(3)[0] == first[0]
    assert not {*rig.table(2)} & {*first, *rig.table(3)}
    assert rig.used == 6


def test_r_4_adapters_share_nothing() -> None:
    """Equal prompts of two adapters, of which one has the number 0, and of the base model have blocks of their own."""
    rig = Rig(16)
    rig.prefill(0, prompt(0, 9), lora_id=0)
    first = rig.table(0)
    rig.generate(0, 9, 10)
    rig.end(0)
    assert rig.run(1, prompt(0, 9), lora_id=0) == 8
    assert rig.prefill(2, prompt(0, 9), lora_id=0) == 8
    assert rig.table(2)[:2] == first[:2]
    assert rig.run(3, prompt(0, 11), lora_id=0) == 10
    assert rig.prefill(4, prompt(0, 9), lora_id=1) == 0
    assert not {*rig.table(4)} & {*rig.table(2)}
    rig.generate(4, 9)
    rig.end(4)
    assert rig.run(5, [*prompt(0, 10), 11], lora_id=1) == 9
    assert rig.prefill(6, prompt(0, 5), lora_id=0) == 4
    assert rig.table(6)[0] == first[0]
    assert rig.prefill(7, prompt(0, 9)) == 0


def test_r_5_extra_ids_and_adapters_together() -> None:
    """Both must agree: the same extra ids of another adapter are not reused, nor other ones of the same."""
    rig = Rig(16)
    assert rig.run(0, SPECIAL, extra_ids=EXTRA, lora_id=1) == 0
    assert rig.run(1, SPECIAL, extra_ids=EXTRA, lora_id=1) == 8
    assert rig.run(2, SPECIAL, extra_ids=EXTRA, lora_id=2) == 0
    assert rig.prefill(3, SPECIAL, extra_ids=ALL_OTHERS, lora_id=1) == 0
    assert rig.prefill(4, SPECIAL, extra_ids=OTHERS_AFTER, lora_id=1) == 4
    assert rig.prefill(5, SPECIAL, extra_ids=OTHERS_AFTER, lora_id=2) == 4
    assert not {*rig.table(4)} & {*rig.table(5)}
    assert rig.used == 9


def test_r_6_salts_share_nothing() -> None:
    """A prompt is reused by requests with the same salt, or without one if it had none."""
    rig = Rig(16)
    tokens = prompt(100, 109)
    salts = [None, "12345", "12345", "67890", None]
    assert [rig.run(number, tokens, cache_salt=salt) for number, salt in enumerate(salts)] == [0, 0, 8, 0, 8]


def test_r_9_a_lookup_finds_the_whole_path() -> None:
    """Of 16 tokens both blocks are found, the second behind the first, and the first behind nothing."""
    rig = Rig(4, 4, size=8, event_buffer_max_size=8)
    rig.run("a", prompt(0, 17))
    parents = {}
    for event in rig.polled():
        if event["data"]["type"] == "stored":
            parent = event["data"]["parent_hash"]
            for block in event["data"]["blocks"]:
                parents[block["block_hash"]] = parent
                parent = block["block_hash"]
    found = [int(block.name, 16) for block in rig.manager.match([*prompt(0, 16), 99]).blocks]
    assert len(found) == 2
    assert parents[found[1]] == found[0]
    assert parents[found[0]] is None


def test_r_12_storing_a_prompt_stores_what_was_computed() -> None:
    """Of 12 tokens 5 are computed: one full block is stored."""
    rig = Rig(8)
    rig.add("a", prompt(0, 12))
    rig.manager.store_context_blocks("a", 5)
    rig.end("a", store=False)
    assert rig.add("b", prompt(0, 12)) == 4


def test_r_13_ending_a_request_stores_what_was_computed() -> None:
    """Of 12 tokens 5 are computed when the request ends: one full block, and the first token of the next."""
    rig = Rig(8)
    rig.add("a", prompt(0, 12))
    rig.manager.store_context_blocks("a", 5)
    rig.end("a")
    # Theirs reuses 4. The K/V of the fifth token is there, and a block may be reused in part.
    assert rig.add("b", prompt(0, 12)) == 5
