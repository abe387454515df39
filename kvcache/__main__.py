"""``python -m kvcache``: the command without its installed script."""

from __future__ import annotations

import sys

from kvcache.cli import console

sys.exit(console())
