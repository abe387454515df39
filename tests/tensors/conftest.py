"""How tests with tensors run: with one thread each, and all that needs Transformers in one worker."""

from __future__ import annotations

import os
from typing import Any

import pytest

WITH_TRANSFORMERS = ("/test_transformers.py", "/test_transformers_unusual.py")

# Before torch is imported, here and in child processes: sums this small are not worth dividing.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler for `--dist loadscope` that keeps modules whole: Transformers is loaded only once."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "transformers" if module.endswith(WITH_TRANSFORMERS) else module

    return ByModule(config, log)
