"""Makes a scheduler as a process of vLLM does, after its plugins are loaded: prints which modules of ours that took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from tests.support.engines.stock_vllm import StockVLLM
    from tests.support.engines.vllm_model import write_model

    assert StockVLLM(write_model(Path(sys.argv[1])), 20).attached is None
    ours = ("kvcache", "events", "sinks")
    print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in ours)))
