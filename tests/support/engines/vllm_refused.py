"""What a manager of ours in vLLM does not serve: engines that do not start, requests that end with an error.

    python -m tests.support.engines.vllm_refused

prints the message for each kind of engine, and how a request with streaming input ended. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from kvcache.errors import Unsupported
from kvcache.integrations.vllm.plugin import register
from tests.support.engines.stock_vllm import StockVLLM
from tests.support.engines.vllm_model import write_model

ENGINES: dict[str, dict[str, Any]] = {
    "sliding": {"window": 32},
    "states": {"others": ("state",)},
    "connector": {"on_failure": "fail"},
    "eagle": {"drafts": 2, "eagle": True},
    "events": {"publishes_events": True},
}


def main() -> dict[str, str]:
    """Make each, and serve the request by one that can be made."""
    register()
    said = dict[str, str]()
    managed: dict[str, Any] = {"additional": {"kvcache": {"mode": "manager"}}}
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory))
        for name, shape in ENGINES.items():
            try:
                StockVLLM(model, 50, **shape, **managed)
            except Unsupported as error:
                said[name] = str(error)
        engine = StockVLLM(model, 50, **managed)
        engine.add("session", [1, 2, 3], 2, resumable=True)
        request = engine.scheduler.requests["session"]
        engine.add("session", [0], 1)  # the end of its input
        while engine.step(random.Random(0)):
            pass
        said["session"] = request.status.name
    return said


if __name__ == "__main__":
    print(json.dumps(main()))
