"""The brokers that tests of feeds run at. A file of one broker's own tests has a fixture `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.kinds import KINDS, REAL, Kind
from tests.support.servers.server import Server


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Each kind of broker; Kafka's is a mock."""
    with request.param(tmp_path) as server:
        yield server


@pytest.fixture(params=REAL)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Each kind that can be killed and started again."""
    with request.param(tmp_path) as server:
        yield server


@pytest.fixture(params=REAL)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of those, to be started with settings of its own."""
    found: Kind = request.param
    return found
