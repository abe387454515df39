"""A made-up log of chat completions, as a proxy in front of a service writes it, and a tokenizer for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "the",
    "a",
    "cache",
    "block",
    "token",
    "prompt",
    "evict",
    "reuse",
    "model",
    "server",
    "why",
    "when",
    "short",
]
TEMPLATE = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<|call|>{{ call.function.name }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def save_tokenizer(directory: Path) -> Path:
    """Train a small byte-level BPE tokenizer, and save it with a chat template as Hugging Face does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [f"<|{name}|>" for name in ("system", "user", "assistant", "tool", "call")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512)  # type: ignore[no-untyped-call]
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


def completions(number: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Calls of chats, some of which use tools; each has all that was said before, and is logged when it is answered."""
    dice, now = random.Random(seed), 1_780_000_000.0
    chats: list[list[dict[str, Any]]] = []
    lines = []
    for at in range(number):
        now += dice.expovariate(0.5)
        if not chats or dice.random() < 0.2:
            chats.append(
                [{"role": "system", "content": f"answer {WORDS[dice.randrange(3)]} " + said(dice, 80)}]
            )
        messages = dice.choice(chats[-30:])
        messages.append({"role": "user", "content": question(dice)})
        answer, usage = reply(dice), {"prompt_tokens": None, "completion_tokens": dice.randint(1, 60)}
        request = {"model": "m", "messages": list(messages)} | (
            {"tools": TOOLS} if len(chats) % 3 == 0 else {}
        )
        response = {
            "id": f"chatcmpl-{at}",
            "object": "chat.completion",
            "created": int(now),
            "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}],
            "usage": usage,
        }
        lines.append({"timestamp": now, "request": request, "response": response, "status": 200})
        messages.append(answer)
        if "tool_calls" in answer:
            messages.append({"role": "tool", "tool_call_id": "c", "content": said(dice, 30)})
    return lines


def said(dice: random.Random, most: int) -> str:
    """Some words."""
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, most)))


def question(dice: random.Random) -> str | list[dict[str, str]]:
    """As a text, or in parts."""
    text = said(dice, 40)
    return text if dice.random() < 0.8 else [{"type": "text", "text": text}]


def reply(dice: random.Random) -> dict[str, Any]:
    """What the model says, or the tool that it calls."""
    if dice.random() < 0.8:
        return {"role": "assistant", "content": said(dice, 60)}
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def write_completions(path: Path, lines: list[dict[str, Any]]) -> Path:
    """As JSON, one a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
