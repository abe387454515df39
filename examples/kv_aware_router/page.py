"""The page: live while rounds are played, and the same with all that was measured inside, to be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcache.report.page import standalone


def page(state: dict[str, Any] | None = None) -> str:
    """One file that asks the network for nothing but, if no state is given, ``/state``.

    Raises UsageError without plotly or jinja2.
    """
    return standalone(Path(__file__).parent, state=state)
