"""What the tests of sinks share."""

from __future__ import annotations

import pytest

from tests.support.ports import free_port


@pytest.fixture
def port() -> int:
    """A free port of loopback."""
    return free_port()
