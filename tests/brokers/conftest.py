"""The brokers that tests of feeds run at. A file of one broker's own tests has a fixture `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.kafka_cluster import MockCluster
from tests.brokers.nats_server import NATSServer
from tests.brokers.redis_server import RedisServer
from tests.brokers.server import Server

Kind = type[NATSServer | RedisServer]
REAL: list[Kind] = [NATSServer, RedisServer]
"""Servers, which can be killed and started again."""


def scheme(kind: type[Server]) -> str:
    return kind.scheme


@pytest.fixture(params=[*REAL, MockCluster], ids=scheme)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Each kind of broker; Kafka's is a mock."""
    with request.param(tmp_path) as server:
        yield server


@pytest.fixture(params=REAL, ids=scheme)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Each kind that can be killed and started again."""
    with request.param(tmp_path) as server:
        yield server


@pytest.fixture(params=REAL, ids=scheme)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of those, to be started with settings of its own."""
    found: Kind = request.param
    return found
