"""Prompts that people give: token ids in a file, or on stdin."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvcache.errors import UsageError

LONGEST_TEXT = 1 << 26
"""Characters of token ids that are read."""


def origin(path: str) -> str:
    """Where the token ids come from, for people."""
    return "stdin" if path == "-" else path


def read_tokens(path: str) -> list[Any]:
    """What a file holds: a JSON list, or numbers between spaces; ``-`` is stdin. Raises UsageError for anything else.

    Whether they are token ids is for `kvcache.inputs.tokens.pack_tokens` to say.
    """
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as file:
            # All of it, or more than is allowed: some files have no end.
            text = file.read(LONGEST_TEXT + 1)
    except UnicodeDecodeError:
        text = "no numbers"
    if len(text) > LONGEST_TEXT:
        raise UsageError(
            f"{origin(path)} holds more than {LONGEST_TEXT:,} characters: no prompt is that long"
        )
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list):
        # SECURITY: the parser's own message would quote the prompt.
        raise UsageError(
            f"{origin(path)} does not hold token ids: write a JSON list of numbers, or numbers between spaces"
        )
    if not tokens:
        raise UsageError(f"{origin(path)} holds no token ids")
    return tokens
