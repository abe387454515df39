"""A cache for Hugging Face Transformers that later calls of ``generate`` reuse.

    cache = PagedCache.for_model(model, primary_bytes="1GiB")
    model.generate(**inputs, past_key_values=cache.request(inputs["input_ids"], inputs["attention_mask"]))

Needs the extra ``transformers``; raises `UsageError` without it, and `Unsupported` for a release that is too old.
"""

from __future__ import annotations

import re

from kvcache.errors import Unsupported, UsageError

try:
    import transformers
except ImportError as error:
    raise UsageError("this cache requires Transformers: pip install 'kvcache[transformers]'") from error

OLDEST = (4, 56)
"""First release with a `Cache` of custom layers."""


def refuse_old(version: str) -> None:
    """Raise `Unsupported` for a release of Transformers that is older than `OLDEST`."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise Unsupported(f"transformers {version}", f"pip install 'transformers>={needed}'")


refuse_old(transformers.__version__)

from kvcache.integrations.transformers.cache import PagedCache  # noqa: E402
from kvcache.integrations.transformers.request import PagedRequest  # noqa: E402

__all__ = ["PagedCache", "PagedRequest"]
