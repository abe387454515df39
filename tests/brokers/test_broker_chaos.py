"""Whatever happens to engine, sidecar, broker, network and routers: when it is quiet, routers know what is cached.

Processes are killed, stopped and restarted at random, connections are late and break, and servers lose what they had
acknowledged. What routers hold when it is quiet is compared with the manager's own state. A seed repeats the
misfortunes, not the moments at which processes are met by them.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.seeds import one_a_day
from tests.support.servers.chaos import Scene
from tests.support.servers.kinds import KINDS
from tests.support.servers.server import Server


def endure(kind: type[Server], seed: int, directory: Path, rounds: int) -> None:
    directory.mkdir(exist_ok=True)
    with ExitStack() as resources:
        broker = resources.enter_context(kind(directory))
        scene = Scene(directory, seed, broker, resources)
        try:
            scene.run(rounds)
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {', '.join(scene.happened)}: {error}") from error


@pytest.mark.parametrize("kind", one_a_day(KINDS))
def test_routers_know_what_is_cached_whatever_happened(kind: type[Server], tmp_path: Path) -> None:
    """After some misfortunes each index equals the residency, and none saw nonsense."""
    endure(kind, 3, tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_routers_know_what_is_cached_after_a_minute(kind: type[Server], tmp_path: Path) -> None:
    """The same for about a minute, at random."""
    first = random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + 4):
        endure(kind, seed, tmp_path / str(seed), 6)
