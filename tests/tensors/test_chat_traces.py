"""Traces whose prompts are messages, which a model's tokenizer and chat template make token ids of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvcache.errors import UsageError
from kvcache.workload.traces import TraceError, TracePrompts, read_trace

WORDS = ["<unk>", "system", "user", "assistant", "tools", "be", "brief", "hello", "again"]
TEMPLATE = (
    "{% if tools %}tools {% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "again"},
]


def save_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # type: ignore[no-untyped-call]
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def calls(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 1, "model": "m", "messages": TURNS[:2], "tools": [{"name": "f"}]},
        {"timestamp": 2, "model": "m", "messages": TURNS, "tools": [{"name": "f"}]},
        {"timestamp": 3, "model": "m", "messages": TURNS},
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_messages_are_rendered(tmp_path: Path) -> None:
    """By the template, with tools, up to where the answer begins; turns of a conversation share their beginning."""
    tokenizer, path = save_tokenizer(tmp_path / "tokenizer"), calls(tmp_path)
    first, second, third = read_trace(path, tokenizer=tokenizer)
    ids = {word: at for at, word in enumerate(WORDS)}
    rendered = "tools system be brief user hello assistant"
    assert first.tokens == tuple(ids[word] for word in rendered.split())
    assert second.tokens is not None
    assert second.tokens[: first.input_length] == first.tokens
    assert third.tokens == second.tokens[1:]
    one, other, _ = TracePrompts(path, tokenizer=tokenizer, tokens_per_block=2)
    assert other[: len(one)] == one
    assert len(one) == 3


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    """A directory without one, one without a template, and messages that a template refuses."""
    path = calls(tmp_path)
    with pytest.raises(UsageError, match="contains no tokenizer"):
        list(read_trace(path, tokenizer=tmp_path))
    bare = save_tokenizer(tmp_path / "bare", None)
    with pytest.raises(UsageError, match="has no chat template"):
        list(read_trace(path, tokenizer=bare))
    strict = save_tokenizer(tmp_path / "strict", "{{ raise_exception('no') }}")
    with pytest.raises(
        TraceError, match=":1: the tokenizer's template refuses these messages: TemplateError"
    ):
        list(read_trace(path, tokenizer=strict))
