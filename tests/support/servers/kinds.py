"""Which brokers tests run at, as parameters that say what each needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers.kafka_cluster import MockCluster
from tests.support.servers.nats_server import NATSServer
from tests.support.servers.redis_server import RedisServer

Kind = type[NATSServer | RedisServer]
REAL: list[Any] = [
    pytest.param(NATSServer, marks=pytest.mark.needs("nats-server"), id="nats"),
    pytest.param(RedisServer, marks=pytest.mark.needs("redis-server"), id="redis"),
]
"""Servers, which can be killed and started again."""
KINDS: list[Any] = [*REAL, pytest.param(MockCluster, id="kafka")]
"""Each kind of broker; Kafka's is a mock."""
