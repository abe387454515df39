"""A plugin of vLLM that breaks the recorder's: its tenth call of some kind raises.

`FAULTY` in the environment says which method of `Recording` it is, or of which class, as MODULE:CLASS.METHOD.
"""

from __future__ import annotations

import importlib
import os
from itertools import count
from typing import Any

AT = 10


def register() -> None:
    """Break it, in every process of vLLM."""
    where, _, name = os.environ["FAULTY"].rpartition(".")
    module, _, owner = where.partition(":")
    faulted: Any = getattr(
        importlib.import_module(module or "kvcache.integrations.vllm.recording"), owner or "Recording"
    )
    method, calls = getattr(faulted, name), count(1)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == AT:
            raise RuntimeError("12345 is a token that no message may hold")
        return method(*args, **kwargs)

    setattr(faulted, name, faulty)
