"""What commands print: facts, tables, JSON on stdout; notes on stderr.

On a terminal rich draws it if it is installed; otherwise, and in pipes, it is plain aligned text, which `grep` and
`awk` like better anyway.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kvcache.audit.phrases import count as count
from kvcache.audit.phrases import duration as duration
from kvcache.audit.phrases import share as share
from kvcache.cli import messages

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[str]
_GAP = "  "
"""Before each column."""
_COLORS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}

_PLAIN_LETTERS = str.maketrans("█▒·–…µ×→±", "#+.-~ux>~")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN_LETTERS)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


PLAIN = "kvcache.plain"
"""An error handler for streams that cannot encode a character: bars and dashes keep their width, others are escaped."""
codecs.register_error(PLAIN, _plain)


class Output:
    """Where a command's output goes, and how it looks there."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose

    def line(self, text: str = "") -> None:
        """One line of the result."""
        print(text)

    def heading(self, text: str) -> None:
        """The title of what follows."""
        print(paint(text, "bold"))

    def json(self, value: Any) -> None:
        """The whole result for a program."""
        print(json.dumps(value, indent=2))

    def note(self, text: str) -> None:
        """Something to know that is not the result."""
        if not self.quiet:
            messages.note(text)

    def warning(self, text: str) -> None:
        """Something that may not be as it was meant."""
        if not self.quiet:
            messages.warning(text)

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Labels with what there is to say about each; an empty label continues the one before."""
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            print(f"  {paint(label.ljust(width), 'cyan')}  {text}".rstrip())

    def table(self, columns: Sequence[str], rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
        """Rows under a heading; the columns named in `right` are aligned to the right.

        Where a drawn table has not enough room it would leave columns out: the terminal then wraps plain lines.
        """
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        console = rich_console(sys.stdout)
        if console is None or console.width < sum(widths) + len(_GAP) * len(widths):
            _print_plain(columns, rows, right, widths)
        else:
            _print_rich(console, columns, rows, right)


def paint(text: str, color: str | None) -> str:
    """The text in a color, where stdout is a terminal that people look at."""
    if color is None or not text.strip() or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m"


def _print_plain(
    columns: Sequence[str], rows: Sequence[Row], right: Sequence[str], widths: Sequence[int]
) -> None:
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        print(_GAP + _GAP.join(cells).rstrip())


def _print_rich(console: Console, columns: Sequence[str], rows: Sequence[Row], right: Sequence[str]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    for row in rows:
        # As Text, since rich would take [brackets] in a plain string for markup.
        table.add_row(*map(Text, row))
    console.print(table)


def rich_console(stream: TextIO) -> Console | None:
    """A console on `stream`, if it is a terminal and rich is installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def bar(first: int, second: int, total: int, width: int) -> str:
    """Two parts of a whole, and its rest."""
    if not total:
        return ""
    one, both = round(width * first / total), round(width * (first + second) / total)
    return "█" * one + "▒" * (both - one) + "·" * (width - both)


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes} B"
