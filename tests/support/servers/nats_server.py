"""A NATS server with JetStream, started and killed by the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import nats
import nats.errors

from tests.support.needs import program
from tests.support.servers.server import STREAM, Server


class NATSServer(Server):
    """With default settings, and what is given as `extra`."""

    scheme = "nats"
    store = "js"

    def __init__(self, directory: Path, extra: str = "", *, jetstream: bool = True) -> None:
        super().__init__(directory)
        config = directory / "nats.conf"
        store = f'jetstream {{ store_dir: "{directory}/{self.store}" }}' if jetstream else ""
        config.write_text(f"listen: 127.0.0.1:{self.port}\n{store}\n{extra}\n")
        self.command = [program("nats-server"), "-c", str(config)]

    @classmethod
    def with_password(cls, directory: Path, user: str, password: str) -> Self:
        users = f'authorization {{ users = [ {{ user: {user}, password: "{password}" }} ] }}'
        return cls(directory, users)

    @classmethod
    def with_tls(cls, directory: Path, certificate: Path, key: Path) -> Self:
        return cls(directory, f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}')

    def empty(self) -> None:
        self.ask(lambda js: js.purge_stream(STREAM))

    def drop(self, worker: str) -> None:
        self.ask(lambda js: js.purge_stream(STREAM, subject=f"{STREAM}.{worker}"))

    def ask(self, question: Callable[[Any], Awaitable[Any]]) -> Any:
        """Past our own client."""

        async def work() -> Any:
            client = await nats.connect(self.url)
            try:
                return await question(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(work())

    def state(self) -> Any:
        return self.ask(lambda js: js.stream_info(STREAM)).state

    def records(self, worker: str) -> list[tuple[str, bytes]]:
        async def fetch(js: Any) -> list[tuple[str, bytes]]:
            last = (await js.stream_info(STREAM)).state.last_seq
            pull = await js.pull_subscribe(f"{STREAM}.{worker}", stream=STREAM)
            found: list[tuple[str, bytes]] = []
            while True:
                try:
                    batch = await pull.fetch(100, timeout=0.3)
                except nats.errors.TimeoutError:
                    return found
                for message in batch:
                    await message.ack()
                    found.append((message.headers["Kvcache-Record"], message.data))
                if batch[-1].metadata.sequence.stream >= last:
                    return found

        found: list[tuple[str, bytes]] = self.ask(fetch)
        return found
