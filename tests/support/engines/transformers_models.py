"""Small models of Transformers with random weights, and conversations with them.

Transformers takes seconds to import: that is left to the tests that use it, so that collecting them takes none.
"""

from __future__ import annotations

import logging
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvcache import KVCacheManager
from kvcache.pools import Pools

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcache.integrations.transformers import PagedCache
    from kvcache.integrations.transformers.shape import ModelShape

# That some settings of generation are not the defaults is said in each call.
logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY, WINDOW = 89, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # Weights so large that tokens matter to each other, and answers differ.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MODELS = ("llama", "mistral", "gemma3", "qwen2")


@cache
def model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Llama with grouped heads; Mistral, which slides; Gemma 3, whose layers differ; Qwen 2, which has biases."""
    import transformers as of

    torch.manual_seed(7)
    made: Any
    if name == "llama":
        made = of.LlamaForCausalLM(of.LlamaConfig(**SHAPE, num_hidden_layers=2))
    elif name == "mistral":
        made = of.MistralForCausalLM(of.MistralConfig(**SHAPE, num_hidden_layers=2, sliding_window=WINDOW))
    elif name == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        own: dict[str, Any] = {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": layers,
            "num_hidden_layers": 3,
        }
        made = of.Gemma3ForCausalLM(of.Gemma3TextConfig(**SHAPE, **own))
    else:
        made = of.Qwen2ForCausalLM(of.Qwen2Config(**SHAPE, num_hidden_layers=2))
    ready = made.eval().to(dtype)
    assert isinstance(ready, of.PreTrainedModel)
    return ready


def for_model(any_model: Any, **settings: Any) -> PagedCache:
    """Return a cache with pools of its own."""
    from kvcache.integrations.transformers import PagedCache

    return PagedCache.for_model(any_model, **settings)


def with_manager(any_model: Any, manager: KVCacheManager, pools: Pools) -> PagedCache:
    """Return a cache over a manager that was made before."""
    from kvcache.integrations.transformers import PagedCache

    return PagedCache(any_model, manager, pools)


def shape_of(any_model: Any) -> ModelShape:
    """Return what a model needs of its cache."""
    from kvcache.integrations.transformers.shape import ModelShape

    return ModelShape.of(any_model)


def cache_for(name: str, **settings: Any) -> PagedCache:
    """A cache with room for a few prompts."""
    usual = {"tokens_per_block": 8, "primary_blocks": 96, "secondary_blocks": 64, "max_sequence_length": 256}
    return for_model(model(name), **{**usual, **settings})


def prompt(seed: int, length: int, rows: int = 1) -> torch.Tensor:
    """Token ids that are neither padding nor the end."""
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of prompts of unequal length, and its mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    return ids, mask


def answered(
    name: str, ids: torch.Tensor, mask: torch.Tensor, past: Any = None, seed: int = 0, **how: Any
) -> Any:
    """What `generate` gives, with its random numbers from a seed; without `past` it makes a cache of its own."""
    torch.manual_seed(seed)
    given = {} if past is None else {"past_key_values": past}
    options = {"max_new_tokens": 6, "do_sample": False, **how}
    any_model: Any = model(name)
    return any_model.generate(ids, attention_mask=mask, **given, **options)


def converse(name: str, kept: PagedCache, seed: int, turns: int = 3) -> list[int]:
    """A random conversation, or several at once, turn by turn, each turn with the cache and without.

    Asserts that both give the same tokens; returns how many columns each turn found in the cache.
    """
    draw, found = random.Random(seed), list[int]()
    system = prompt(draw.randrange(3), 40)[0].tolist()
    talks = [system[: draw.randrange(8, 40)] for _ in range(draw.choice((1, 1, 2, 3)))]
    for turn in range(turns):
        for talk in talks:
            talk += draw.choices(range(2, VOCABULARY), k=draw.randrange(1, 12))
        if draw.random() < 0.2:
            draw.choice(talks)[-3] = 2  # what was said last is edited
        ids, mask = padded(talks)
        how: dict[str, Any] = {"max_new_tokens": draw.randrange(1, 10)}
        if draw.random() < 0.5:
            how |= {"do_sample": True, "temperature": 0.8, "top_k": 0}
        alone = answered(name, ids, mask, seed=seed + turn, **how)
        request = kept.request(ids, mask)
        found.append(request.get_seq_length())
        cached = answered(name, ids, mask, request, seed=seed + turn, **how)
        del request
        assert torch.equal(alone, cached)
        talks = [
            [token for token in row[width - len(talk) :] if token]
            for row, talk, width in zip(cached.tolist(), talks, [ids.shape[1]] * len(talks), strict=True)
        ]
    return found
