"""The command ``kvcache``: play requests through a cache, and read, replay and search the logs it leaves.

One module per command, each with `add_parser` and `run`. `main` turns errors into one line and an exit code. No
module here loads torch; of the commands only ``run`` (with pools) and ``doctor`` do.
"""

from __future__ import annotations

from kvcache.cli.main import main

__all__ = ["main"]
