"""The page of results: live during the rounds, or self-contained with all data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.report.page import standalone


def page(state: dict[str, Any] | None = None) -> str:
    """Return the page; without `state` it polls ``/state``, otherwise it makes no requests.

    Raises UsageError without plotly or jinja2.
    """
    return standalone(Path(__file__).parent, state=state)
