"""Makes SGLang's scheduler, and prints which modules of this library are there then.

    python -m tests.support.engines.sglang_loaded DIRECTORY

Runs where SGLang is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.engines.stock_sglang import HookRegistry, StockSGLang

if __name__ == "__main__":
    assert StockSGLang(Path(sys.argv[1]), 640).attached is None
    assert not HookRegistry._hooks
    print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "kvcache")))
