"""Options shared by several commands, and argument types."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from events.units import parse_bytes
from kvcache.audit.kv_shape import DTYPES
from kvcache.cli import times
from kvcache.errors import UsageError

LONGEST_TEXT = 1 << 26
"""Maximum number of characters of token ids that are read."""
_MOST_DIGITS = 19
"""Maximum number of digits of a number given here; Python itself reads no more than some thousands."""
_MOST_GPUS, _MOST_MONEY = 10**6, 10**9


TOKENS_HELP = (
    "file of token ids (JSON list, or numbers separated by spaces or commas; -: stdin), or the ids: 5,6,7"
)
_IDS = re.compile(r"\d+(?:[\s,]+\d+)+", re.ASCII)
"""Token ids given in place of a file."""


def _at_least(least: int, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is too large")
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer that is at least {least}")
    return int(text)


natural = partial(_at_least, 0)
"""Parser of an integer, at least 0."""
positive = partial(_at_least, 1)
"""Parser of an integer, at least 1."""


def integer(text: str) -> int:
    """Parse any integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def number(words: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of numbers for which `accepts` is true; `words` describe them in errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return parse


seconds = number("a number of seconds from 0 on", lambda value: 0 <= value < math.inf)
"""Parser of a finite number of seconds, at least 0."""
amount = number(f"an amount above 0 and at most {_MOST_MONEY:,}", lambda value: 0 < value <= _MOST_MONEY)
"""Parser of an amount of money, above 0."""


def gpus(text: str) -> int:
    """Parse a number of GPUs."""
    if (number := positive(text)) > _MOST_GPUS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_GPUS:,}")
    return number


class SizeInBytes(int):
    """Size of a cache given in bytes; a plain integer is one in blocks."""


def cache_size(text: str) -> int:
    """Parse a number of blocks, at least 1, or a `SizeInBytes`, as in ``8GiB``."""
    if not text.endswith("B"):
        return positive(text)
    try:
        return SizeInBytes(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


Place = argparse.ArgumentParser | argparse._ArgumentGroup
_SPELLING = (
    "format of times, cut to milliseconds: since the log's first batch (relative, the default), or the time of day in "
    "UTC or local time"
)
TOKENS_PER_BLOCK = 64
"""Tokens of a block, where neither an option nor the hash_ids of a trace say."""
CONCURRENCY = 32
"""Default for the number of requests of a played trace that run at once."""
_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("LOG", "LOG_A", "LOG_B", "TRACE", "FILE", "DIR", "PATH"), Path),
    "N": positive,
    "SECONDS": seconds,
    "TIME": times.length,
    "MOMENT": times.LogPosition.parse,
}
"""Types of values by their names in the help; all others are texts."""
_SHARED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "log": ("LOG", "a log directory", {}),
    "at": ("--at MOMENT", "", {}),
    "since": ("--since MOMENT", "", {}),
    "until": ("--until MOMENT", "", {}),
    "time": ("--time", _SPELLING, {"choices": times.FORMS, "default": "relative"}),
    "every": ("--every SECONDS", "", {}),
    "json": ("--json", "print the result as JSON", {}),
    "trace_block_size": (
        "--trace-block-size N",
        "tokens per hash_id of the trace (default: detected from the first lines; 16 for a Bailian trace)",
        {},
    ),
    "tokenizer": (
        "--tokenizer DIR",
        "directory of the model's tokenizer with its chat template, for a trace whose prompts are messages",
        {},
    ),
    "concurrency": (
        "--concurrency N",
        f"maximum number of requests running at once (default: {CONCURRENCY})",
        {"default": CONCURRENCY},
    ),
    "tokens_per_block": ("--tokens-per-block N", "", {}),
    "primary_blocks": ("--primary-blocks N", "", {"type": cache_size}),
    "secondary_blocks": (
        "--secondary-blocks N",
        "",
        {"type": lambda text: 0 if text == "0" else cache_size(text)},
    ),
    "lora_id": ("--lora-id N", "number of the LoRA adapter", {"type": integer}),
    "lora_name": ("--lora-name NAME", "name of the LoRA adapter", {}),
    "cache_salt": ("--cache-salt SALT", "cache salt of the prompt", {}),
}
"""Options shared by several commands, by argument name: usage, purpose, and parser arguments."""
_NAMESPACE = ("lora_id", "lora_name", "cache_salt")


def option(place: Place, usage: str, purpose: str, **more: Any) -> None:
    """Declare an argument in the form of its help.

    ``-o --output FILE`` is an option with a value, ``--force`` a flag (unless it has `choices`), ``TRACE`` an argument
    by its place. The name of a value determines its type. `more` are further arguments for argparse.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    if values := [word for word in usage.split() if word not in names]:
        more = {"metavar": values[0], "type": _TYPES.get(values[0]), **more}
    elif "choices" not in more:
        more["action"] = "store_true"
    place.add_argument(*(names or [usage.lower()]), help=purpose, **more)


def add_shared(place: Place, *names: str, **purposes: str) -> None:
    """Declare shared options; those in `purposes` (such as ``at="..."``) with another help."""
    for name in (*names, *purposes):
        usage, purpose, more = _SHARED[name]
        option(place, usage, purposes.get(name, purpose), **more)


def add_namespace(place: Place, of: str) -> None:
    """Declare the namespace options of the tokens given by the option `of`."""
    add_shared(place, **{name: f"{_SHARED[name][1]}, with {of}" for name in _NAMESPACE})


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for converting tokens to seconds, money and bytes (`kvcache.cli.costs`)."""
    add = partial(
        option,
        parser.add_argument_group(
            "seconds, money and GiB", "`kvcache docs cost` explains how these are computed."
        ),
    )
    add(
        "--prefill FORMULA",
        "seconds of a prefill of n tokens that attend to m tokens each on average, as in '4ms + 60us n + 0.2ns n m'",
    )
    add(
        "--prefill-fit FILE",
        "CSV file with the columns tokens,cached,seconds, or log, to which the formula is fitted",
    )
    add(
        "--gpus N",
        "number of GPUs that compute a prefill together (default: that of --tensor-parallel)",
        type=gpus,
    )
    add(
        "--price AMOUNT",
        "price of a GPU-hour, for the cost of prefills and the savings by reuse",
        type=amount,
    )
    add("--currency NAME", "currency of --price (default: USD)", default="USD")
    add(
        "--model-config FILE",
        "config.json of the model in Hugging Face's format, to show bytes as well as blocks (default: the model in "
        "the log's settings)",
    )
    add(
        "--kv-dtype NAME",
        "type of the elements of K and V: fp8, bf16, ... (default: that of the model)",
        choices=sorted(DTYPES),
    )
    add(
        "--tensor-parallel N",
        "number of GPUs over which the heads of K and V are divided (default: 1)",
        type=gpus,
        default=1,
    )


def add_cache_sizes(
    place: Place, model: str, tokens_per_block: str = f"tokens of a block ({TOKENS_PER_BLOCK})"
) -> None:
    """Declare the size options of the cache that plays a trace; `model` is what bytes are taken with."""
    in_bytes = f"; or, with {model}, their bytes, as in 12GiB"
    add_shared(
        place,
        tokens_per_block=tokens_per_block,
        primary_blocks=f"blocks on the device{in_bytes}",
        secondary_blocks=f"blocks in host memory; 0: none{in_bytes}",
    )


@contextmanager
def seekable(path: Path) -> Iterator[Path]:
    """Yield a path that can be read twice: that of a copy if this is a pipe, or ``-`` for stdin."""
    if str(path) != "-" and (path.is_file() or path.is_dir() or not path.exists()):
        yield path
        return
    with ExitStack() as files:
        pipe = sys.stdin.buffer if str(path) == "-" else files.enter_context(path.open("rb"))
        copy = files.enter_context(NamedTemporaryFile(prefix="trace-"))
        shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield Path(copy.name)


def add_status_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare the interval and form of status lines about `what`."""
    add_shared(
        parser,
        every=f"seconds between two lines about {what} (default: 10)",
        json="print these lines as JSON objects on stdout",
    )
    parser.set_defaults(every=10.0)


def has_namespace(args: argparse.Namespace) -> bool:
    """Return True if one of these options is given."""
    return any(getattr(args, name) is not None for name in _NAMESPACE)


# -- prompts


def origin(given: str) -> str:
    """Format the source of token ids for people."""
    return "stdin" if given == "-" else "the given prompt" if _IDS.fullmatch(given) else given


def read_tokens(given: str) -> list[Any]:
    """Read token ids: a list (``5,6,7``), or a file (``-`` is stdin) of a JSON list or of numbers.

    Raises UsageError for anything else. `kvcache.inputs.pack_tokens` checks that they are token ids.
    """
    text = given if _IDS.fullmatch(given) else _text_in(given)
    if len(text) > LONGEST_TEXT:
        raise UsageError(f"{origin(given)} has more than {LONGEST_TEXT:,} characters, too many for a prompt")
    try:
        is_list = text.lstrip().startswith("[")
        tokens = json.loads(text) if is_list else [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list):
        # SECURITY: the parser's own message would quote the prompt.
        raise UsageError(
            f"{origin(given)} does not contain token ids: write a JSON list, or numbers separated by spaces or commas"
        )
    if not tokens:
        raise UsageError(f"{origin(given)} contains no token ids")
    return tokens


def _text_in(path: str) -> str:
    """Read all of it, up to just above the limit: some files have no end."""
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as file:
            return file.read(LONGEST_TEXT + 1)
    except FileNotFoundError:
        raise UsageError(f"{path} is neither a file nor token ids, such as 5,6,7") from None
    except UnicodeDecodeError:
        return "no numbers"
