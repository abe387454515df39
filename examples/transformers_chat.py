"""A chat with Hugging Face Transformers that keeps K and V between calls of `generate`.

    python examples/transformers_chat.py

The model is a Llama with random weights: nothing is downloaded, and what it says means nothing. A long system prompt is
asked about twice; then two chats go on in one batch. Answers are those of Transformers' own cache, token by token.
"""

from __future__ import annotations

import os
import timeit
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache.integrations.transformers import PagedCache

PROMPT, QUESTION, ANSWER, VOCABULARY = 2000, 20, 12, 1000


def small_llama() -> Any:
    """Four layers, eight query heads on two KV heads."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **heads, **ends, vocab_size=VOCABULARY, max_position_embeddings=4096)
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


def tokens(count: int) -> torch.Tensor:
    """What a tokenizer would give for so much text."""
    return torch.randint(1, VOCABULARY, (1, count))


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch, as of `tokenizer(..., padding=True)` with `padding_side="left"`."""
    width = max(each.shape[1] for each in prompts)
    pads = [width - each.shape[1] for each in prompts]
    ids = [
        torch.cat([torch.zeros(1, pad, dtype=torch.int64), each], 1)
        for pad, each in zip(pads, prompts, strict=True)
    ]
    mask = torch.arange(width) >= torch.tensor(pads)[:, None]
    return {"input_ids": torch.cat(ids), "attention_mask": mask.to(torch.int64)}


def answer(
    model: Any, inputs: dict[str, torch.Tensor], cache: PagedCache | None, length: int = ANSWER
) -> Any:
    """Prompts and answers."""
    past = {}
    if cache is not None:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        past["past_key_values"] = cache.request(ids, mask, max_new_tokens=length)
    return model.generate(**inputs, **past, max_new_tokens=length, do_sample=False)


def first_token_ms(model: Any, inputs: dict[str, torch.Tensor], cache: PagedCache | None) -> float:
    """How long one more token takes, at best of three."""
    return 1000 * min(timeit.repeat(lambda: answer(model, inputs, cache, length=1), number=1, repeat=3))


def main() -> None:
    """Ask, ask again, and go on with two chats at once."""
    model = small_llama()
    with PagedCache.for_model(model, primary_bytes="64MiB", host_cache_size="64MiB") as cache:
        system = tokens(PROMPT)
        inputs = left_padded([system])
        without = first_token_ms(model, inputs, None)
        answer(model, inputs, cache)
        cached = first_token_ms(model, inputs, cache)
        print(f"{PROMPT} tokens, time to the first token: {without:.0f} ms without the cache,", end=" ")
        print(f"{cached:.0f} ms when they are cached: {without / cached:.0f} times faster")
        chats = [torch.cat([system, tokens(QUESTION)], 1), torch.cat([system, tokens(QUESTION // 2)], 1)]
        for turn in (1, 2, 3):
            inputs = left_padded(chats)
            before = cache.manager.stats()
            answered = answer(model, inputs, cache)
            same = torch.equal(answered, answer(model, inputs, None))
            now = cache.manager.stats()
            reused, of = now.reused_tokens - before.reused_tokens, now.prompt_tokens - before.prompt_tokens
            print(f"turn {turn}: {reused} of {of} prompt tokens reused; as without the cache: {same}")
            seen = inputs["attention_mask"].sum(1) + ANSWER
            chats = [
                torch.cat([row[-int(length) :][None], tokens(QUESTION)], 1)
                for row, length in zip(answered, seen, strict=True)
            ]
        cache.manager.check()


if __name__ == "__main__":
    main()
