"""Options that several commands have, and the types that arguments are read with."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvcache.cli import times
from kvcache.errors import UsageError

LONGEST_TEXT = 1 << 26
"""Characters of token ids that are read."""
_MOST_DIGITS = 19
"""Of a number that one gives here; Python itself reads no more than some thousands."""


def natural(text: str) -> int:
    """An integer, at least 0."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """An integer, at least 1."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is too large a number")
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return int(text)


def integer(text: str) -> int:
    """Any integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def seconds(text: str) -> float:
    """A finite number of seconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


_MOMENT: dict[str, Any] = {"type": times.argument, "metavar": times.METAVAR}
_SHARED: dict[str, dict[str, Any]] = {
    "log": {"type": Path, "metavar": "LOG", "help": "a log directory"},
    "--at": _MOMENT,
    "--since": _MOMENT,
    "--until": _MOMENT,
    "--time": {
        "choices": times.FORMS,
        "default": "relative",
        "help": "how times are shown, cut to milliseconds: since the log's first batch (relative, as it is without "
        "this), or the time of day",
    },
    "--every": {"type": seconds, "metavar": "SECONDS"},
    "--json": {"action": "store_true", "help": "the result as JSON"},
    "--lora-id": {"type": integer, "metavar": "N", "help": "the adapter's number"},
    "--lora-name": {"metavar": "NAME", "help": "the adapter's name"},
    "--cache-salt": {"metavar": "SALT", "help": "the salt of the prompt's namespace"},
}


def add_shared(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **purposes: str
) -> None:
    """Declare options that other commands have, too; those of `purposes` (such as ``at="..."``) with another help."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])
    for key, purpose in purposes.items():
        name = key if key in _SHARED else f"--{key.replace('_', '-')}"
        parser.add_argument(name, **{**_SHARED[name], "help": purpose})


def add_namespace(parser: argparse.ArgumentParser | argparse._ArgumentGroup, of: str) -> None:
    """Declare the options that belong to the tokens given by the option `of`."""
    names = ("--lora-id", "--lora-name", "--cache-salt")
    for name in names:
        parser.add_argument(name, **{**_SHARED[name], "help": f"with {of}: {_SHARED[name]['help']}"})


def add_status_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare when lines come that tell `what`, and in which form."""
    purpose = f"between two lines that tell {what} (10)"
    parser.add_argument("--every", type=seconds, default=10.0, metavar="SECONDS", help=purpose)
    add_shared(parser, json="these lines as JSON on stdout, one object each")


def has_namespace(args: argparse.Namespace) -> bool:
    """Whether one of these options is given."""
    return (args.lora_id, args.lora_name, args.cache_salt) != (None, None, None)


# -- prompts


def origin(path: str) -> str:
    """Where the token ids come from, for people."""
    return "stdin" if path == "-" else path


def read_tokens(path: str) -> list[Any]:
    """What a file holds: a JSON list, or numbers between spaces; ``-`` is stdin. Raises UsageError for anything else.

    Whether they are token ids is for `kvcache.inputs.pack_tokens` to say.
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
