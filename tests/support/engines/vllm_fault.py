"""A plugin of vLLM that breaks the recorder's: its tenth call of some kind raises.

`FAULTY` in the environment says which method of `Recording` it is.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

AT = 10


def register() -> None:
    """Break it, in every process of vLLM."""
    from kvcache.integrations.vllm.recording import Recording

    name, calls = os.environ["FAULTY"], count(1)
    method = getattr(Recording, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == AT:
            raise RuntimeError("12345 is a token that no message may hold")
        return method(*args, **kwargs)

    setattr(Recording, name, faulty)
