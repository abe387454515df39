"""The page: live while rounds are played, and the same with all that was measured inside, to be kept."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

from kvcache.report.markup import data_block
from kvcache.report.page import plotly_js

_HOME = Path(__file__).parent


def page(state: dict[str, Any] | None = None) -> str:
    """One file that asks the network for nothing but, if no state is given, ``/state``.

    Raises UsageError without plotly.
    """
    plotly, own = plotly_js(), (_HOME / "page.js").read_text(encoding="utf-8")
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly, own))
    return Template((_HOME / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; connect-src 'self'; script-src {digests}; "
        "style-src 'unsafe-inline'; img-src data: blob:",
        style=(_HOME / "page.css").read_text(encoding="utf-8"),
        data=data_block("state", json.loads(json.dumps(state))),
        plotly=plotly,
        script=own,
    )


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
