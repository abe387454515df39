"""Token ids made from a trace's numbers."""

from __future__ import annotations

import numpy as np

from kvcache.workload.tokens import (
    PROMPT_VOCABULARY,
    TRACE_BLOCK_TOKENS,
    mix64,
    output_tokens,
    prompt_tokens,
)


def test_equal_numbers_are_equal_tokens_wherever_they_stand() -> None:
    """A block's tokens depend on its number alone, not on the prompt or the place in it."""
    one, other = prompt_tokens([3, 5], 1024), prompt_tokens([5, 9, 3], 1536)
    assert np.array_equal(one[512:], other[:512])
    assert np.array_equal(one[:512], other[1024:])


def test_prompt_is_cut_to_its_length() -> None:
    """A shorter prompt of the same numbers is the start of the longer one; unused numbers do not matter."""
    whole = prompt_tokens([1, 2, 3], 3 * TRACE_BLOCK_TOKENS)
    for length in (1, 511, 512, 513, 1535):
        assert np.array_equal(prompt_tokens([1, 2, 3], length), whole[:length])
    assert np.array_equal(prompt_tokens([1, 99], 512), whole[:512])


def test_different_numbers_share_tokens_only_by_chance() -> None:
    """Blocks with neighbouring or huge numbers, and equal ones of another seed, have next to no token in common."""
    numbers = [0, 1, 2, 2**32, 2**63 - 1]
    blocks = [prompt_tokens([number], 512, seed) for number in numbers for seed in (0, 1)]
    for index, block in enumerate(blocks):
        for other in blocks[:index]:
            assert np.count_nonzero(block == other) < 5


def test_prompt_tokens_are_spread_over_the_vocabulary() -> None:
    """Tokens are int32 from 0 to the vocabulary's end, each half of it used as often as the other."""
    tokens = prompt_tokens(range(100), 51_200).reshape(100, 512)[:, 1:]
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() < 100
    assert PROMPT_VOCABULARY - 100 < tokens.max() < PROMPT_VOCABULARY
    assert abs(np.count_nonzero(tokens < PROMPT_VOCABULARY // 2) - 25_550) < 1000


def test_no_two_blocks_begin_alike() -> None:
    """The first token of a block is its own, so that a partial match is never a chance hit."""
    firsts = prompt_tokens([*range(5000), 2**40, 2**63 - 1], 5002 * 512)[::512]
    assert len(set(firsts.tolist())) == 5002
    assert int(firsts.min()) >= 2 * PROMPT_VOCABULARY


def test_outputs_have_an_alphabet_of_their_own() -> None:
    """Outputs never hold a prompt's token, and differ from request to request."""
    outputs = [output_tokens(index, 300) for index in range(50)]
    assert min(int(output.min()) for output in outputs) >= PROMPT_VOCABULARY
    assert max(int(output.max()) for output in outputs) < 2 * PROMPT_VOCABULARY
    assert len({output[:8].tobytes() for output in outputs}) == 50
    assert output_tokens(3, 0).shape == (0,)
    # The same request goes on the same way, however far one looks.
    assert np.array_equal(output_tokens(3, 10), output_tokens(3, 300)[:10])


def test_mix64_is_the_published_finalizer() -> None:
    """The scrambling is that of splitmix64: its first outputs for seed 0 are the published ones."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(1, 4, dtype=np.uint64) * gamma
    assert [hex(value) for value in mix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
