"""A log's report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from events.log import LogEnd
from kvcache.audit import open_log
from kvcache.report.beside import add_curve, add_whatif
from kvcache.report.gathered import Progress, gather
from kvcache.report.given import GivenCurve, WhatIf, refuse_other, understood
from kvcache.report.page import page, plotly_js
from kvcache.report.sections import add_requests, overview_of

_Form = TypeVar("_Form", GivenCurve, WhatIf)


def report(
    log: str | PathLike[str],
    *,
    curve: Mapping[str, Any] | GivenCurve | None = None,
    whatif: Mapping[str, Any] | WhatIf | None = None,
    progress: Progress = lambda _: None,
    ended: Callable[[LogEnd], None] = lambda _: None,
) -> str:
    """The HTML of a page about what a log's cache did. It needs no network, and holds no tokens and no salts.

    `curve` and `whatif` are what `kvcache curve LOG --json` and `kvcache whatif LOG --json` print, and add a section
    each. The log is read twice; `progress` is called with the batches read, `ended` with how the log ends. Raises
    `UsageError` where plotly is not installed, where what is given is something else or about another log, and what
    reading and replaying a log raise.
    """
    plotly = plotly_js()
    directory = Path(log)
    own_curve = _own(directory, curve, GivenCurve)
    own_whatif = _own(directory, whatif, WhatIf)
    found = gather(directory, progress)
    ended(found.end)
    parts = overview_of(found)
    if own_curve is not None:
        add_curve(parts, own_curve)
    if own_whatif is not None:
        add_whatif(parts, own_whatif)
    add_requests(parts, found)
    return page(directory.resolve().name, found, parts, plotly)


def _own(log: Path, given: object, form: type[_Form]) -> _Form | None:
    """What was given, if it is about this log."""
    if given is None:
        return None
    own = understood(given, form, f"{form.command}=")
    refuse_other(open_log(log).log_id, own, f"{form.command}=")
    return own
