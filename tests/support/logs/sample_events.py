"""One sample of each kind of event, from the golden file."""

from __future__ import annotations

import json
from typing import Any

from tests.support.places import ROOT

GOLDEN = ROOT / "tests" / "golden"
EVENTS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "events.json").read_text(encoding="utf-8"))
KEY_BYTES = 32
