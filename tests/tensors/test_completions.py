"""A request log of a thousand chat completions: `curve` and `audit` with a tokenizer, and what is wrong with lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.commands import Kvcache
from tests.support.logs.completions import completions, save_tokenizer, write_completions

Line = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer")


def rendered(request: Line) -> str:
    """A prompt as the template is meant, written without it."""
    text = "".join(f"<|tool|>{tool['function']['name']}" for tool in request.get("tools", []))
    for message in request["messages"]:
        content = message["content"] or ""
        text += f"<|{message['role']}|>"
        text += content if isinstance(content, str) else "".join(part["text"] for part in content)
        text += "".join(f"<|call|>{call['function']['name']}" for call in message.get("tool_calls", []))
    return text + "<|assistant|>"


def test_a_thousand_calls(kvcache: Kvcache, tmp_path: Path, tokenizer: Path) -> None:
    """All is as of the same prompts as token ids, which the tokenizer alone has made; nothing is said on stderr."""
    lines, encoder = completions(1000), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    as_tokens = []
    for line in lines:
        tokens = encoder.encode(rendered(line["request"]), add_special_tokens=False).ids
        line["response"]["usage"] |= {
            "prompt_tokens": len(tokens),
            "prompt_tokens_details": {"cached_tokens": len(tokens) // 64 * 32},
        }
        as_tokens.append(
            {
                "timestamp": line["timestamp"],
                "prompt_token_ids": tokens,
                "model": "m",
                "response": line["response"],
            }
        )
    assert (
        max(len(line["prompt_token_ids"]) for line in as_tokens) > 512
    )  # longer than the tokenizer's model takes
    log = write_completions(tmp_path / "log.jsonl", lines)
    same = write_completions(tmp_path / "tokens.jsonl", as_tokens)
    results: list[Line] = []
    for command in ("curve", "audit"):
        results.clear()
        for call in ((log, "--tokenizer", tokenizer), (same,)):
            done = kvcache(command, *call, "--json", "-q")
            assert (done.code, done.err) == (0, "")
            results.append(json.loads(done.out) | {"trace": "", "end": None})
        assert results[0] == results[1]
        assert results[0]["reported"]["lengths"]["differing"] == 0
    assert results[0]["requests"] == 1000
    assert results[0]["reused_tokens"] > 0.4 * results[0]["prompt_tokens"]


def test_another_template(kvcache: Kvcache, tmp_path: Path, tokenizer: Path) -> None:
    """Lengths that the service counted otherwise show that the template is another one."""
    lines = completions(20)
    for line in lines:
        line["response"]["usage"]["prompt_tokens"] = 7
    log = write_completions(tmp_path / "log.jsonl", lines)
    done = kvcache("curve", log, "--tokenizer", tokenizer)
    assert done.err.startswith(
        "kvcache: warning: 20 of 20 prompts differ in length from usage.prompt_tokens ("
    )


def take(*path: str) -> Callable[[Line], Any]:
    """Remove a field."""

    def change(line: Line) -> None:
        for name in path[:-1]:
            line = line[name]
        line.pop(path[-1])

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line["request"].update(messages="hello"), "got `str` - at `$.request.messages`"),
        (lambda line: line["request"].update(messages=["hello"]), "got `str` - at `$.request.messages[0]`"),
        (take("request", "messages"), "neither prompt_token_ids nor messages: the prompt is unknown"),
        (lambda line: line.update(request="{}"), "got `str` - at `$.request`"),
        (
            lambda line: line.update(timestamp="yesterday"),
            "the timestamp is neither a number nor an ISO 8601 time",
        ),
        (lambda line: line.update(timestamp=-1), "`float` >= 0.0 - at `$.timestamp`"),
        (lambda line: line["response"].update(usage=[]), "got `array` - at `$.response.usage`"),
        (
            lambda line: line["response"]["usage"].update(prompt_tokens_details={"cached_tokens": "9"}),
            "got `str` - at `$.response.usage.prompt_tokens_details.cached_tokens`",
        ),
    ],
)
def test_bad_lines(
    kvcache: Kvcache, tmp_path: Path, tokenizer: Path, change: Callable[[Line], Any], said: str
) -> None:
    """The file, the line and the field, and no text of a prompt."""
    lines = completions(3)
    change(lines[1])
    log = write_completions(tmp_path / "log.jsonl", lines)
    done = kvcache("curve", log, "--tokenizer", tokenizer)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"kvcache: error: {log}:2: ")
    assert said in done.err


def test_what_is_no_log_of_lines(kvcache: Kvcache, tmp_path: Path, tokenizer: Path) -> None:
    """A list, a line that was cut off, nothing, and no tokenizer."""
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(completions(2), indent=1))
    assert (
        f"{log}:1: a JSON list: write one item per line"
        in kvcache("curve", log, "--tokenizer", tokenizer).err
    )
    write_completions(log, completions(2))
    log.write_text(log.read_text()[:-30])
    assert f"{log}:2: Input data was truncated" in kvcache("curve", log, "--tokenizer", tokenizer).err
    assert f"{log}:1: the prompt consists of messages: give --tokenizer" in kvcache("curve", log).err
    assert "is not a directory: a tokenizer is one" in kvcache("curve", log, "--tokenizer", log).err
    log.write_text("")
    assert f"{log} contains no requests" in kvcache("curve", log, "--tokenizer", tokenizer).err
