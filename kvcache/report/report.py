"""A log's report."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kvcache.report.beside import add_curve, add_whatif
from kvcache.report.gathered import Progress, gather
from kvcache.report.page import page, plotly_js
from kvcache.report.sections import add_requests, overview_of


def report(
    log: str | PathLike[str],
    *,
    curve: Mapping[str, Any] | None = None,
    whatif: Mapping[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> str:
    """The HTML of a page about what a log's cache did. It needs no network, and holds no tokens and no salts.

    `curve` and `whatif` are what `kvcache curve LOG --json` and `kvcache whatif LOG --json` print, and add a section
    each. The log is read twice; `progress` is called with the batches read. Raises `UsageError` where plotly is not
    installed or what is given is something else, and what reading and replaying a log raise.
    """
    plotly = plotly_js()
    directory = Path(log)
    found = gather(directory, progress)
    parts = overview_of(found)
    if curve is not None:
        add_curve(parts, curve)
    if whatif is not None:
        add_whatif(parts, whatif)
    add_requests(parts, found)
    return page(directory.resolve().name, found, parts, plotly)
