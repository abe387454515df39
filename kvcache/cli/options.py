"""Options that several commands have, and the types that arguments are read with."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
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
"""Characters of token ids that are read."""
_MOST_DIGITS = 19
"""Of a number that one gives here; Python itself reads no more than some thousands."""
_MOST_GPUS, _MOST_MONEY = 10**6, 10**9


TOKENS_HELP = "token ids: a JSON list, or numbers between spaces or commas; - for stdin; or the ids: 5,6,7"
_IDS = re.compile(r"\d+(?:[\s,]+\d+)+", re.ASCII)
"""Token ids in place of a file."""


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


def gpus(text: str) -> int:
    """How many GPUs."""
    if (number := positive(text)) > _MOST_GPUS:
        raise argparse.ArgumentTypeError(f"{text!r} is too large a number: at most {_MOST_GPUS:,}")
    return number


def amount(text: str) -> float:
    """A number above 0, of money."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST_MONEY:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {_MOST_MONEY:,}")
    return value


class SizeInBytes(int):
    """The size of a cache that was given in bytes; a plain integer is one in blocks."""


def cache_size(text: str) -> int:
    """Blocks, at least 1, or a `SizeInBytes`, as in ``8GiB``."""
    if not text.endswith("B"):
        return positive(text)
    try:
        return SizeInBytes(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


Place = argparse.ArgumentParser | argparse._ArgumentGroup
_SPELLING = (
    "how times are shown, cut to milliseconds: since the log's first batch (relative, as it is without this), or the "
    "time of day"
)
CONCURRENCY = 32
"""How many requests a played trace runs at once."""
_MOMENT = {"type": times.LogPosition.parse}
_SHARED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "log": ("LOG", "a log directory", {"type": Path}),
    "at": ("--at MOMENT", "", _MOMENT),
    "since": ("--since MOMENT", "", _MOMENT),
    "until": ("--until MOMENT", "", _MOMENT),
    "time": (
        "--time",
        _SPELLING,
        {"choices": times.FORMS, "default": "relative"},
    ),
    "every": ("--every SECONDS", "", {"type": seconds}),
    "json": ("--json", "the result as JSON", {}),
    "trace_block_size": (
        "--trace-block-size N",
        "tokens that a hash_id of the trace stands for (found from its first lines; 16 with a Bailian trace)",
        {"type": positive},
    ),
    "tokenizer": (
        "--tokenizer DIR",
        "the model's tokenizer with its chat template, for a trace whose prompts are messages",
        {"type": Path},
    ),
    "concurrency": (
        "--concurrency N",
        f"most requests running at once ({CONCURRENCY})",
        {"type": positive, "default": CONCURRENCY},
    ),
    "tokens_per_block": ("--tokens-per-block N", "tokens of a block (64)", {"type": positive}),
    "primary_blocks": ("--primary-blocks N", "blocks on the device", {"type": positive}),
    "secondary_blocks": ("--secondary-blocks N", "blocks in host memory; 0: none", {"type": natural}),
    "lora_id": ("--lora-id N", "the adapter's number", {"type": integer}),
    "lora_name": ("--lora-name NAME", "the adapter's name", {}),
    "cache_salt": ("--cache-salt SALT", "the salt of the prompt's namespace", {}),
}
"""Options that several commands have, by their names in the arguments: usage, purpose, and how they are read."""
_NAMESPACE = ("lora_id", "lora_name", "cache_salt")


def option(place: Place, usage: str, purpose: str, **more: Any) -> None:
    """Declare an argument as its help shows it.

    ``-o --output FILE`` is an option with a value, ``--force`` a flag (unless it has `choices`), ``TRACE`` an argument
    by its place. `more` is what argparse takes besides.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    if values := [word for word in usage.split() if word not in names]:
        more["metavar"] = values[0]
    elif "choices" not in more:
        more["action"] = "store_true"
    place.add_argument(*(names or [usage.lower()]), help=purpose, **more)


def add_shared(place: Place, *names: str, **purposes: str) -> None:
    """Declare options that other commands have, too; those of `purposes` (such as ``at="..."``) with another help."""
    for name in (*names, *purposes):
        usage, purpose, more = _SHARED[name]
        option(place, usage, purposes.get(name, purpose), **more)


def add_namespace(place: Place, of: str) -> None:
    """Declare the options that belong to the tokens given by the option `of`."""
    add_shared(place, **{name: f"with {of}: {_SHARED[name][1]}" for name in _NAMESPACE})


def add_trace_options(place: Place) -> None:
    """Declare how a trace is read."""
    add_shared(place, "trace_block_size", "tokenizer")


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    """Declare what tokens are worked out with as seconds, money and bytes (`kvcache.cli.costs`)."""
    add = partial(
        option,
        parser.add_argument_group(
            "seconds, money and GiB", "`kvcache docs cost` says how they are worked out."
        ),
    )
    add(
        "--prefill FORMULA",
        "seconds to compute n prompt tokens that read m others each, on average: '4ms + 60us n + 0.2ns n m'",
    )
    add(
        "--prefill-fit FILE",
        "fit that formula to a CSV file with the columns tokens,cached,seconds, or to the steps of a log",
        type=Path,
    )
    add("--gpus N", "GPUs that compute a prefill together (those of --tensor-parallel)", type=gpus)
    add("--price AMOUNT", "of a GPU for an hour: what prefills cost, and what reuse saves", type=amount)
    add("--currency NAME", "of that price (USD)", default="USD")
    add(
        "--model-config FILE",
        "the model's config.json, as Hugging Face has it: bytes beside blocks (as the log's settings say)",
        type=Path,
    )
    add(
        "--kv-dtype NAME",
        "of the elements of K and V: fp8, bf16, ... (that of the model)",
        choices=sorted(DTYPES),
    )
    add(
        "--tensor-parallel N",
        "GPUs over which the heads of K and V are divided (1)",
        type=gpus,
        default=1,
    )


def add_cache_sizes(place: Place) -> None:
    """Declare how large the cache is that plays a trace."""
    add_shared(place, "tokens_per_block", "primary_blocks", "secondary_blocks")


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
    """Declare when lines come that tell `what`, and in which form."""
    add_shared(
        parser,
        every=f"between two lines that tell {what} (10)",
        json="these lines as JSON on stdout, one object each",
    )
    parser.set_defaults(every=10.0)


def has_namespace(args: argparse.Namespace) -> bool:
    """Whether one of these options is given."""
    return any(getattr(args, name) is not None for name in _NAMESPACE)


# -- prompts


def origin(given: str) -> str:
    """Where the token ids come from, for people."""
    return "stdin" if given == "-" else "the prompt given" if _IDS.fullmatch(given) else given


def read_tokens(given: str) -> list[Any]:
    """Token ids: themselves (``5,6,7``), or a file (``-`` is stdin) of a JSON list or of numbers.

    Raises UsageError for anything else. Whether they are token ids is for `kvcache.inputs.pack_tokens` to say.
    """
    text = given if _IDS.fullmatch(given) else _text_in(given)
    if len(text) > LONGEST_TEXT:
        raise UsageError(
            f"{origin(given)} holds more than {LONGEST_TEXT:,} characters: no prompt is that long"
        )
    try:
        is_list = text.lstrip().startswith("[")
        tokens = json.loads(text) if is_list else [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        tokens = None
    if not isinstance(tokens, list):
        # SECURITY: the parser's own message would quote the prompt.
        raise UsageError(
            f"{origin(given)} does not hold token ids: write a JSON list, or numbers between spaces or commas"
        )
    if not tokens:
        raise UsageError(f"{origin(given)} holds no token ids")
    return tokens


def _text_in(path: str) -> str:
    """All of it, or more than is allowed: some files have no end."""
    try:
        with nullcontext(sys.stdin) if path == "-" else Path(path).open(encoding="utf-8") as file:
            return file.read(LONGEST_TEXT + 1)
    except FileNotFoundError:
        raise UsageError(f"{path} is neither a file nor token ids, such as 5,6,7") from None
    except UnicodeDecodeError:
        return "no numbers"
