"""The brokers that tests of feeds run at. A file of one broker's own tests has a fixture `server` of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.kafka_cluster import MockCluster
from tests.support.servers.kinds import KINDS, REAL, Kind
from tests.support.servers.server import Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def mock_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockCluster]:
    """One for all tests, each of which has a topic of its own: starting it takes longer than most of them."""
    with MockCluster(tmp_path_factory.mktemp("kafka")) as cluster:
        yield cluster


@pytest.fixture
def cluster(mock_cluster: MockCluster) -> MockCluster:
    """Kafka's mock, with an empty topic."""
    return mock_cluster.with_stream(f"test-{next(_numbers)}")


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Each kind of broker; Kafka's is a mock."""
    if request.param is MockCluster:
        yield request.getfixturevalue("cluster")
        return
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
