"""The real manager over the real copier, on a device that misbehaves in all ways that are allowed."""

from __future__ import annotations

import pytest

from cuda_ops.copier import Copier
from cuda_ops.simulated import SimulatedGpu
from tests.support.engines.byte_engine import Chosen, Driver, at_once
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.seeds import seeds


def run(seed: int, steps: int = 60) -> Driver:
    """Nothing fails, some calls of the driver do in the middle, or whole batches, of which the host hears late."""
    kind = seed % 3

    def late_and_failing(copier: Copier) -> Copier:
        return LateCopier(FailingCopier(copier, Chosen(seed, 6)), seed % 5)

    gpu = SimulatedGpu(seed, Chosen(seed, 8) if kind == 1 else ())
    driver = Driver(seed, late_and_failing if kind == 2 else at_once, trusted=False, gpu=gpu)
    driver.run(steps)
    return driver


@pytest.mark.parametrize("first", seeds(range(0, 300, 10), quick=3))
def test_bytes_follow_events_on_a_device_that_misbehaves(first: int) -> None:
    """After any commands what is cached and what sequences read is right."""
    for seed in range(first, first + 10):
        run(seed)
