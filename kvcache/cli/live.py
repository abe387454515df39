"""What is shown again and again: drawn in place on a terminal, otherwise printed, or as one JSON object a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.cli.output import Output, rich_console

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

_IDLE = 10
"""Looking at all there is, and drawing, may take this part of the time, and no more."""


class View(NamedTuple):
    """A table, and what is to be said above and below it."""

    columns: Sequence[str]
    """Empty: there is no table."""
    rows: Sequence[Sequence[str]]
    styles: Sequence[str]
    """Of each row: how rich is to draw it."""
    left: Sequence[str] = ()
    """Columns that are aligned to the left."""
    gap: int = 2
    """Before each column."""
    heading: str = ""
    below: Sequence[str] = ()
    rule: bool = True
    """Whether there is a line below the names of columns."""

    @property
    def height(self) -> int:
        """Lines that it takes, if none is too long."""
        table = 1 + self.rule + len(self.rows) if self.columns else 0
        return (self.heading != "") + table + len(self.below)


Views = Callable[[int | None, int | None], Sequence[View]]
"""What is to be seen in that number of columns and lines; None: any."""


class Paced:
    """Shows something at most once in `every` seconds, and seldom enough not to be in the way of other work."""

    def __init__(self, show: Callable[[], None], every: float, first: float = 0.0) -> None:
        self._show, self._every = show, every
        self._due = time.monotonic() + first

    def show_if_due(self) -> None:
        """Show it, if it is time for that."""
        begun = time.monotonic()
        if begun >= self._due:
            self._show()
            ended = time.monotonic()
            self._due = ended + max(self._every, _IDLE * (ended - begun))


@contextmanager
def display(
    views: Views, to_json: Callable[[], dict[str, Any]] | None, out: Output
) -> Iterator[tuple[Callable[[], None], bool]]:
    """What shows the present state, and whether it does so in place; `to_json` is given if JSON is wanted."""
    console = None if to_json is not None else rich_console(sys.stdout)
    if to_json is not None:
        yield lambda: print(json.dumps(to_json()), flush=True), False
    elif console is None:
        yield lambda: print_views(views(None, None), out), False
    else:
        from rich.live import Live

        # No thread of its own: a state is drawn between two batches, never in the middle of one.
        with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:

            def draw() -> None:
                live.update(drawn(*views(console.width, console.height)), refresh=True)

            yield draw, True


def print_views(views: Sequence[View], out: Output) -> None:
    """Print tables one below the other."""
    for view in views:
        if view.heading:
            out.heading(view.heading)
        if view.columns:
            out.table(view.columns, view.rows, right=[each for each in view.columns if each not in view.left])
        for line in view.below:
            out.line(line)
    sys.stdout.flush()


def drawn(*views: View) -> Group:
    """Tables for rich."""
    from rich.console import Group

    return Group(*(part for view in views for part in _parts(view)))


def _parts(view: View) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if view.heading:
        yield Text(view.heading, style="bold")
    if view.columns:
        padding = (0, view.gap - view.rule, 0, 0)  # a frame has a space between columns
        frame = box.SIMPLE_HEAD if view.rule else None
        table = Table(box=frame, header_style="bold", show_edge=False, padding=padding)
        for name in view.columns:
            table.add_column(name, justify="left" if name in view.left else "right", no_wrap=True)
        for row, style in zip(view.rows, view.styles, strict=True):
            table.add_row(*map(Text, row), style=style)
        yield table
    yield from map(Text, view.below)
