"""Output of commands: facts, tables, JSON on stdout; notes and progress on stderr.

On a terminal rich draws tables, and updates changing output in place. In pipes it is plain aligned text, which suits
`grep` and `awk`.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from kvcache.cli import messages
from kvcache.phrases import describe_end, duration, is_whole, iso, printable, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from events.log import LogEnd
    from events.types import EventBatch
    from kvcache.audit.histogram import Ages
    from kvcache.publish.follower import CatchUp

Row = Mapping[str, Any]
"""Cells, texts and integers, by column name."""
Facts = Iterable[tuple[str, str]]
Update = Callable[[int], None]
_COLORS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
_IDLE = 10
"""Minimum ratio of the pause between updates to the time that an update takes."""
_SECONDS_BETWEEN = 0.1
"""Seconds between updates: a terminal takes longer to draw than many steps take to run."""
_PLAIN_LETTERS = str.maketrans("█▒·–…µ×→±", "#+.-~ux>~")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN_LETTERS)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


PLAIN = "kvcache.plain"
"""Error handler for streams that cannot encode a character: bars and dashes keep their width, others are escaped."""
codecs.register_error(PLAIN, _plain)


class Output:
    """Output of a command, with its style."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._frame: list[RenderableType] | None = None
        """Sink for output while a frame is drawn in place."""

    def line(self, text: str = "") -> None:
        """Print one line of the result."""
        if self._frame is None:
            print(text)
        else:
            from rich.text import Text

            self._frame.append(Text.from_ansi(text))

    def heading(self, text: str) -> None:
        """Print the title of what follows."""
        self.line(paint(text, "bold"))

    def json(self, value: Any) -> None:
        """Print the whole result for a program."""
        print(json.dumps(jsonable(value), indent=2))

    def note(self, text: str) -> None:
        """Print a note, which is not part of the result."""
        if not self.quiet:
            messages.note(text)

    def note_end(self, end: LogEnd | None, log: object = None) -> None:
        """Print a note on a log that was pruned, has a torn end, lacks its last batches, or may grow.

        `log` is its name if there are several.
        """
        which = "the log" if log is None else printable(str(log))
        if end is not None and end.begins is not None:
            self.note(
                f"{which} begins with a snapshot after batch {end.begins:,}; earlier batches were removed"
            )
        if end is not None and not is_whole(end):
            self.note(f"{which} is {describe_end(end)}")

    def warning(self, text: str) -> None:
        """Print a warning."""
        if not self.quiet:
            messages.warning(text)

    def facts(self, facts: Facts) -> None:
        """Print facts with labels; an empty label continues the previous fact."""
        rows = list(facts)
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            self.line(f"  {paint(label.ljust(width), 'cyan')}  {text}".rstrip())

    def table(
        self, rows: Sequence[Row], *, right: Sequence[str] = (), styles: Sequence[str] = (), gap: bool = False
    ) -> None:
        """Print rows under a heading, with the columns of the first one; nothing if there are none.

        Numbers, and the columns in `right`, are aligned to the right; `styles` are rich's for each row. `gap` is an
        empty line before the table.
        """
        if not rows:
            return
        if gap:
            self.line()
        columns = list(rows[0])
        right = [name for name in columns if name in right or any(isinstance(row[name], int) for row in rows)]
        cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()] for row in rows]
        if self._frame is not None:
            self._frame.append(_drawn(columns, cells, right, styles))
        elif (console := rich_console(sys.stdout)) is not None:
            console.print(_drawn(columns, cells, right, styles, ruled=True))
        else:
            widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
            places = [
                f">{width}" if name in right else width for name, width in zip(columns, widths, strict=True)
            ]
            line = "".join(f"  {{:{place}}}" for place in places)
            for row in (columns, *cells):
                print(line.format(*row).rstrip())

    @contextmanager
    def progress(self, title: str, total: int | None = None) -> Iterator[Update]:
        """Yield a function to be called with the amount done of `total`: on a terminal a bar shows it on stderr."""
        console = None if self.quiet else rich_console(sys.stderr)
        if console is None:
            yield lambda _: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Without a thread of its own: it would take time from what is being measured.
        bar = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            task, drawn = bar.add_task(title, total=total), 0.0

            def update(done: int) -> None:
                nonlocal drawn
                if (now := time.monotonic()) - drawn >= _SECONDS_BETWEEN:
                    drawn = now
                    bar.update(task, completed=done)
                    bar.refresh()

            yield update

    def watched(self, batches: Iterable[EventBatch], title: str = "reading") -> Iterator[EventBatch]:
        """Yield the batches, and show the progress."""
        with self.progress(title) as update:
            yield from updating(batches, update)

    @contextmanager
    def live(
        self, draw: Callable[[], None], to_json: Callable[[], object] | None
    ) -> Iterator[tuple[Callable[[], None], bool]]:
        """Yield a function that shows the current state, and True if it does so in place.

        `draw` prints the state to this output; `to_json` returns it for one JSON object per line instead.
        """
        console = None if to_json is not None else rich_console(sys.stdout)
        if to_json is not None:
            yield lambda: print_json(to_json()), False
        elif console is None:

            def show() -> None:
                draw()
                sys.stdout.flush()

            yield show, False
        else:
            from rich.console import Group
            from rich.live import Live

            # Without a thread of its own: a state is drawn between two batches, never in the middle of one.
            with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
                yield lambda: live.update(Group(*self.frame(draw)), refresh=True), True

    def frame(self, draw: Callable[[], None]) -> list[RenderableType]:
        """Return the output of `draw` as rich renderables."""
        frame: list[RenderableType] = []
        self._frame = frame
        try:
            draw()
        finally:
            self._frame = None
        return frame


def updating(batches: Iterable[EventBatch], update: Update) -> Iterator[EventBatch]:
    """Yield the batches, and update a progress with each."""
    for batch in batches:
        update(batch.seq)
        yield batch


def paced(show: Callable[[], None], every: float, first: float = 0.0) -> Callable[[], None]:
    """Return `show` throttled to once in `every` seconds, and to a small part of the time."""
    due = time.monotonic() + first

    def show_if_due() -> None:
        nonlocal due
        if (begun := time.monotonic()) >= due:
            show()
            ended = time.monotonic()
            due = ended + max(every, _IDLE * (ended - begun))

    return show_if_due


class StatusLines:
    """Periodic status lines of a command that runs until it is stopped; none repeats the previous one.

    One is due `first` seconds from now, and then at most one in `every` seconds.
    """

    def __init__(self, out: Output, every: float, first: float = 0) -> None:
        self._out, self._every, self._due = out, every, time.monotonic() + first
        self._said: object = None

    def is_due(self) -> bool:
        """Return True if a line is due, and start the next interval."""
        if (now := time.monotonic()) < self._due:
            return False
        self._due = now + self._every
        return True

    def say(self, status: object) -> None:
        """Print a status if it has changed: a text as a note for people, all else as JSON on stdout."""
        if status == self._said:
            return
        self._said = status
        if isinstance(status, str):
            self._out.note(status)
        else:
            print_json(status)


def paint(text: str, color: str | None) -> str:
    """Return the text in a color if stdout is a terminal."""
    if color is None or not text.strip() or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m"


def _drawn(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    styles: Sequence[str],
    *,
    ruled: bool = False,
) -> Table:
    """Return a table for rich; cells wider than their column wrap."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    frame = box.SIMPLE_HEAD if ruled else None
    table = Table(box=frame, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        # As Text, since rich would take [brackets] in a plain string for markup.
        table.add_row(*map(Text, row), style=styles[number] if styles else None)
    return table


def rich_console(stream: TextIO) -> Console | None:
    """Return a console on `stream` if it is a terminal and rich is installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


def bar(first: int, second: int, total: int, width: int) -> str:
    """Format two parts of a whole, and the rest, as a bar."""
    if not total:
        return ""
    one, both = round(width * first / total), round(width * (first + second) / total)
    return "█" * one + "▒" * (both - one) + "·" * (width - both)


def left_of_log(catch_up: CatchUp) -> str:
    """Format the distance to the end of a log, and the time to get there once the pace is known."""
    text = f"catching up: {size(catch_up.bytes_left)} of the log left"
    if catch_up.seconds_left is None:
        return text
    return f"{text}, {catch_up.batches_per_second:,.0f} batches/s, {duration(catch_up.seconds_left)} left"


# -- JSON


def jsonable(value: Any) -> Any:
    """Convert dataclasses, structs, named tuples, paths and arrays for `json`."""
    import msgspec

    def encode(value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value.tolist()

    return msgspec.to_builtins(value, enc_hook=encode, str_keys=True)


def print_json(value: Any) -> None:
    """Print one object per line."""
    print(json.dumps(jsonable(value)), flush=True)


def pick(whole: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Return attributes for JSON, those in `renamed` under their new keys."""
    return {key: getattr(whole, name) for key, name in [*zip(names, names, strict=True), *renamed.items()]}


def stamp(seq: int | None, ts: int | None, prefix: str = "") -> dict[str, Any]:
    """Return the number of a batch and its time, as in all JSON."""
    return {f"{prefix}seq": seq, f"{prefix}ts": ts, f"{prefix}time": None if ts is None else iso(ts)}


def by_level(values: Iterable[Any] | None) -> dict[str, Any] | None:
    """Return the values of both levels by name; None if they are unknown."""
    from events.structs import LEVEL_NAMES

    return None if values is None else dict(zip(LEVEL_NAMES, values, strict=True))


def end_json(end: LogEnd | None) -> dict[str, Any] | None:
    """Return the end of a log; None if it was not read to its end."""
    return None if end is None else pick(end, "kind", "path", "offset", "next_seq", "begins")


def ages_json(ages: Ages) -> dict[str, Any]:
    """Return quantiles, and the histogram."""
    return {
        "count": ages.total,
        **{f"p{percent}_seconds": ages.quantile(percent / 100) for percent in (10, 50, 90)},
        "histogram": [{"up_to_seconds": edge, "count": blocks} for edge, blocks in ages.rows()],
    }


def ages_in_words(ages: Ages) -> str:
    """Format the median, and the first and last deciles."""
    low, middle, high = (duration(ages.quantile(part) or 0.0) for part in (0.1, 0.5, 0.9))
    return f"{middle} ({low} to {high})"
