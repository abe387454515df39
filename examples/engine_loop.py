"""Three requests through the cache, as an engine would serve them: everything but the model.

The second prompt begins like the first, so its first block is reused; it needs room, so blocks of the first move to
host memory. The third repeats the first: what moved away is copied back. At the end the log replays to the same state.
"""

from tempfile import TemporaryDirectory

import torch

from kvcache import KVCacheConfig, KVCacheManager, Layout, replay
from kvcache.pools import Pools

BLOCK = 4
CONFIG = KVCacheConfig(max_sequence_length=12, tokens_per_block=BLOCK, primary_blocks=3, secondary_blocks=8)
PROMPTS = {
    "first": [11, 12, 13, 14, 15, 16, 17, 18, 19],
    "second": [11, 12, 13, 14, 25, 26, 27],
    "third": [11, 12, 13, 14, 15, 16, 17, 18, 19],
}
OUTPUT = [101, 102, 103]  # what the model would sample


def forward(manager: KVCacheManager, pools: Pools, name: str, tokens: list[int], computed: int) -> None:
    """Write K and V of the tokens from `computed` on, in every layer, once the bytes before them are there."""
    ticket = manager.start_transfers()
    if ticket is not None:
        ticket.wait()  # on a GPU: ticket.wait_on(stream), and the host goes on
    positions = torch.arange(computed, len(tokens))
    slots = torch.as_tensor(manager.block_table(name))[positions // BLOCK]
    for layer in range(CONFIG.num_layers):
        cache = pools.layer(layer)  # [blocks, K and V, tokens of a block, heads, dim]
        cache[slots, :, positions % BLOCK] = torch.tensor(tokens[computed:]).to(cache.dtype).view(-1, 1, 1, 1)


def serve(manager: KVCacheManager, pools: Pools, name: str, tokens: list[int]) -> int:
    """One request from its admission to its end; returns how many tokens of the prompt were reused."""
    admission = manager.add_sequence(name, tokens)
    forward(manager, pools, name, tokens, admission.reused_tokens)
    manager.store_context_blocks(name, len(tokens))  # full blocks can be reused from now on
    for token in OUTPUT:
        manager.add_tokens([name], [token])
        tokens = [*tokens, token]
        forward(manager, pools, name, tokens, len(tokens) - 1)
        manager.flush()  # the end of a step: its events go to the log and to the sinks
    manager.remove_sequence(name)
    return admission.reused_tokens


if __name__ == "__main__":
    pools = Pools(Layout.of(CONFIG), device="cpu")
    with TemporaryDirectory() as log:
        with KVCacheManager(CONFIG, pools=pools, log=log, sinks=["stdout:"]) as manager:
            reused = {name: serve(manager, pools, name, prompt) for name, prompt in PROMPTS.items()}
            fingerprint = manager.fingerprint()
        print("prompt tokens that were reused:", reused)
        print("the log replays to the same state:", replay.replay(log).fingerprint == fingerprint)
