"""Three requests through the cache, as an engine would serve them: everything but the model.

Run it with ``python examples/engine_loop.py``. The second prompt begins like the first, so its first block is found
in the cache. It needs room, so blocks of the first move to host memory. The third repeats the first: what moved away
is copied back. After each step the events are printed; with ``log=`` and ``sinks=`` they would go there by themselves.
"""

from __future__ import annotations

import torch

from kvcache import KVCacheConfig, KVCacheManager, Layout
from kvcache.pools import Pools
from sinks.render import render_batch

BLOCK = 4
CONFIG = KVCacheConfig(
    max_sequence_length=64,
    tokens_per_block=BLOCK,
    primary_blocks=3,
    secondary_blocks=8,
    block_hash="v2_sha256_64",
)
PROMPTS = {
    "first": [11, 12, 13, 14, 15, 16, 17, 18, 19],
    "second": [11, 12, 13, 14, 25, 26, 27],
    "third": [11, 12, 13, 14, 15, 16, 17, 18, 19],
}
OUTPUT = [101, 102, 103]
"""What the model would sample."""


def forward(pools: Pools, table: list[int], tokens: list[int], begin: int) -> None:
    """A model's forward pass: write K and V of the tokens from `begin` on, in every layer."""
    for layer in range(CONFIG.num_layers):
        cache = pools.layer(layer)  # [blocks, K and V, tokens of a block, heads, dim]
        for position in range(begin, len(tokens)):
            cache[table[position // BLOCK], :, position % BLOCK] = float(tokens[position])


def step(manager: KVCacheManager, pools: Pools, name: str, tokens: list[int], computed: int) -> None:
    """Bring the bytes that were asked for, then compute what is missing."""
    ticket = manager.start_transfers()
    if ticket is not None:
        ticket.wait()  # on a GPU: ticket.wait_on(stream), and the host goes on
    forward(pools, manager.block_table(name).tolist(), tokens, computed)


def serve(manager: KVCacheManager, pools: Pools, name: str, tokens: list[int]) -> None:
    """One request from its admission to its end."""
    admission = manager.add_sequence(name, tokens)
    print(f"{name}: {admission.reused_tokens} of {len(tokens)} prompt tokens are reused")
    step(manager, pools, name, tokens, admission.reused_tokens)
    manager.store_context_blocks(name, len(tokens))  # full blocks can be reused from now on
    for token in OUTPUT:
        tokens = [*tokens, token]
        manager.add_tokens([name], [token])
        step(manager, pools, name, tokens, len(tokens) - 1)
        end_step(manager)
    manager.remove_sequence(name)
    end_step(manager)


def end_step(manager: KVCacheManager) -> None:
    """Publish what happened in this step."""
    batch = manager.flush()
    if batch is not None:
        print(*render_batch(batch, key_bytes=32), sep="\n")


def main() -> None:
    """Serve all prompts with one cache."""
    pools = Pools(Layout.of(CONFIG), device=torch.device("cpu"))
    with KVCacheManager(CONFIG, pools=pools) as manager:
        for name, prompt in PROMPTS.items():
            serve(manager, pools, name, prompt)
        stats = manager.stats()
        print(f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens were reused")


if __name__ == "__main__":
    main()
