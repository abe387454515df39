"""A Redis server, started and killed by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from redis import BusyLoadingError, Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.needs import program
from tests.support.servers.server import STREAM, Server


class RedisServer(Server):
    """Everything that it acknowledges is on the disk."""

    scheme = "redis"
    store = "appendonlydir"

    def __init__(self, directory: Path, *extra: str, tls: tuple[Path, Path] | None = None) -> None:
        super().__init__(directory)
        self._can_ask = tls is None
        ports = ["--port", str(self.port)]
        if tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += ["--tls-cert-file", str(tls[0]), "--tls-key-file", str(tls[1])]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        where = ["--bind", "127.0.0.1", "--dir", str(directory)]
        self.command = [program("redis-server"), *where, *ports, *durable, *extra]

    @classmethod
    def with_password(cls, directory: Path, user: str, password: str) -> Self:
        return cls(
            directory, "--user", user, "on", f">{password}", "~*", "&*", "+@all", "--user", "default", "off"
        )

    @classmethod
    def with_tls(cls, directory: Path, certificate: Path, key: Path) -> Self:
        return cls(directory, tls=(certificate, key))

    def answers(self) -> bool:
        """It listens before it has read its files, and refuses meanwhile."""
        if not self._can_ask or not super().answers():
            return super().answers()
        with Redis(port=self.port, retry=Retry(NoBackoff(), 0)) as client:
            try:
                client.ping()
            except BusyLoadingError:
                return False
            except RedisError:
                return True
        return True

    def empty(self) -> None:
        with Redis(port=self.port) as client:
            client.flushall()

    def drop(self, worker: str) -> None:
        with Redis(port=self.port) as client:
            client.delete(f"{STREAM}:{worker}")

    def records(self, worker: str) -> list[tuple[str, bytes]]:
        with Redis(port=self.port) as client:
            entries = client.xrange(f"{STREAM}:{worker}")
            return [(fields[b"record"].decode(), fields[b"payload"]) for _, fields in entries]
