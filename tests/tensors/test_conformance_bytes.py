"""Which bytes a block holds that was copied in part, or to secondary and back: R-8."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from events.types import PRIMARY
from kvcache.config import KVCacheConfig
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools
from tests.support.engines import strategies
from tests.support.engines.rig import prompt

DTYPES = [dtype for dtype in get_args(KVCacheConfig.model_fields["dtype"].annotation) if dtype != "auto"]
UNTOUCHED = 0xAA


class Memory:
    """A manager over pools of one model's shape, on the host; blocks are seen as bytes, [layers, K/V, tokens, ...]."""

    def __init__(self, dtype: str, kv_layout: str) -> None:
        config = strategies.config(
            primary_blocks=4, secondary_blocks=4, tokens_per_block=8, max_sequence_length=4096,
            num_layers=12, num_kv_heads=6, head_dim=128, dtype=dtype, kv_layout=kv_layout,
        )  # fmt: skip
        self.pools = Pools(Layout.of(config), "cpu")
        self.manager = KVCacheManager(config, pools=self.pools)
        ((self.pool,),) = self.pools.groups
        self.random = torch.Generator().manual_seed(1)

    def add(self, name: str, tokens: list[int]) -> tuple[int, list[int]]:
        """Admit, and wait for the copies; returns the tokens that are reused, and the slots."""
        reused = self.manager.add_sequence(name, tokens).reused_tokens
        ticket = self.manager.start_transfers()
        if ticket is not None:
            ticket.wait()
        self.manager.poll()
        slots: list[int] = self.manager.block_table(name).tolist()
        return reused, slots

    def block(self, slot: int) -> torch.Tensor:
        """The bytes of a primary block, with its tokens as the third dimension in both layouts."""
        block = self.pool.levels[PRIMARY][slot]
        return block.view(torch.uint8).movedim(self.pool.token_dim - 1, 2)

    def write(self, slots: list[int]) -> list[torch.Tensor]:
        """Fill blocks with bytes that tell every place apart from most others; returns what each holds."""
        for slot in slots:
            block = self.block(slot)
            block.copy_(torch.randint(0, 256, block.shape, dtype=torch.uint8, generator=self.random))
        return [self.block(slot).clone() for slot in slots]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_r_8_a_copy_of_a_part_has_the_bytes_of_that_part(dtype: str, kv_layout: str) -> None:
    """Blocks come back from secondary as they were; of one that is copied in part, only these tokens are written."""
    memory = Memory(dtype, kv_layout)
    manager = memory.manager
    _, slots = memory.add("a", prompt(0, 17))
    pattern = memory.write(slots)
    manager.store_context_blocks("a", 17)
    manager.remove_sequence("a")

    _, slots = memory.add(
        "other", prompt(100, 132)
    )  # takes all of primary, so that all else goes to secondary
    memory.write(slots)
    manager.remove_sequence("other", store=False)
    assert [block.level for block in manager.match(prompt(0, 17)).blocks] == [1, 1]

    reused, slots = memory.add("a again", prompt(0, 17))
    assert reused == 16
    assert all(torch.equal(memory.block(slot), was) for slot, was in zip(slots[:2], pattern, strict=False))
    manager.store_context_blocks("a again", 17)

    (free,) = {0, 1, 2, 3} - {*slots}
    memory.block(free).fill_(UNTOUCHED)
    reused, (first, copy) = memory.add("part", prompt(0, 12))
    assert (reused, first, copy) == (11, slots[0], free)
    assert torch.equal(memory.block(copy)[:, :, :3], pattern[1][:, :, :3])
    assert bool((memory.block(copy)[:, :, 3:] == UNTOUCHED).all())
    assert torch.equal(memory.block(slots[1]), pattern[1])
