"""How far a long command is: on a terminal a bar on stderr that goes away when it is done, or words."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcache.cli.output import duration, size
from kvcache.publish.follower import CatchUp

Update = Callable[[int], None]
_SECONDS_BETWEEN = 0.1
"""A terminal takes longer to draw than many steps take to run."""


@contextmanager
def progress(title: str, total: int | None, *, shown: bool) -> Iterator[Update]:
    """Give a function to be called with how much is done of `total` (None: unknown)."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    with _bar(title, total) as draw:
        drawn = 0.0

        def update(done: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _SECONDS_BETWEEN:
                drawn = now
                draw(done)

        yield update


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Update]:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda done: _draw_plain(title, done, total)
        sys.stderr.write("\r" + " " * 70 + "\r")
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No thread of its own: it would take time from what is being measured.
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(title, total=total)

        def draw(done: int) -> None:
            bar.update(task, completed=done)
            bar.refresh()

        yield draw


def _draw_plain(title: str, done: int, total: int | None) -> None:
    of = "" if total is None else f" of {total:,}"
    sys.stderr.write(f"\r{title} {done:,}{of}".ljust(70))
    sys.stderr.flush()


def left_of_log(catch_up: CatchUp) -> str:
    """How long it takes to come to the end of a log; the pace is unknown at first."""
    text = f"catching up: {size(catch_up.bytes_left)} of the log left"
    if catch_up.seconds_left is None:
        return text
    return f"{text}, {catch_up.batches_per_second:,.0f} batches/s, {duration(catch_up.seconds_left)} more"
