"""What all tests share is in `tests.support`: how they run in `plugin`, fixtures of commands in `commands`."""

from __future__ import annotations

import pytest

# What differs is said as in tests themselves.
pytest.register_assert_rewrite("tests.support", "tests.oracles")
pytest_plugins = ["tests.support.plugin", "tests.support.commands", "tests.support.logs.held_disk"]
