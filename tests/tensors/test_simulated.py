"""Late and failing devices move real bytes, late or in part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cuda_ops.copier import Copier, Copy, CopyFailed
from cuda_ops.torch_copier import TorchCopier
from tests.support.engines.simulated import FailingCopier, LateCopier


@dataclass
class Storage:
    levels: tuple[torch.Tensor, ...]
    token_dim: int = 1


class Device:
    """Four slots per level, one byte each: primary holds 10, 11, 12, 13 and secondary zeros."""

    def __init__(self) -> None:
        primary = torch.arange(10, 14, dtype=torch.uint8).view(4, 1, 1)
        self.levels = (primary, torch.zeros_like(primary))
        self.copier: Copier = TorchCopier([[Storage(self.levels)]])

    @property
    def secondary(self) -> list[int]:
        return self.levels[1].flatten().tolist()


def copy(source: int, target: int, levels: tuple[int, int] = (0, 1)) -> Copy:
    return Copy(*levels, np.array([source], np.int32), np.array([target], np.int32))


def test_bytes_move_only_after_the_ticks() -> None:
    """Before the last tick the target holds its old bytes; then the batch is done."""
    device = Device()
    late = LateCopier(device.copier, steps=2)
    ticket = late.submit([copy(0, 1)])
    late.tick()
    assert not ticket.done()
    assert device.secondary == [0, 0, 0, 0]
    late.tick()
    assert ticket.done()
    assert device.secondary == [0, 10, 0, 0]
    assert late.waiting == 0


def test_a_late_batch_copies_what_is_there_when_it_runs() -> None:
    """Overwriting a source without waiting for the ticket spoils the copy, as on a device."""
    device = Device()
    late = LateCopier(device.copier, steps=1)
    late.submit([copy(0, 1)])
    device.levels[0][0] = 99
    late.tick()
    assert device.secondary == [0, 99, 0, 0]


def test_waiting_brings_earlier_batches_forward() -> None:
    """Waiting for the second batch runs the first one before it, and leaves the third alone."""
    device = Device()
    late = LateCopier(device.copier, steps=5)
    first, second, third = (late.submit([each]) for each in [copy(0, 1), copy(1, 1), copy(2, 2)])
    second.wait()
    assert first.done()
    assert second.done()
    assert not third.done()
    assert device.secondary == [0, 11, 0, 0]


def test_a_wait_on_the_device_moves_bytes_without_sending_the_host() -> None:
    """The compute stream sees the bytes at once; the host hears of the batch after the ticks, and once is enough."""
    device = Device()
    late = LateCopier(device.copier, steps=1)
    ticket, later = late.submit([copy(0, 1)]), late.submit([copy(2, 2)])
    ticket.wait_on()
    assert device.secondary == [0, 10, 0, 0]
    assert not ticket.done()
    device.levels[0][0] = 99
    late.tick()
    assert ticket.done()
    assert later.done()
    assert device.secondary == [0, 10, 12, 0]


def test_a_wait_on_a_landed_batch_moves_nothing_else() -> None:
    """Waiting for what has landed does not bring later batches forward."""
    device = Device()
    late = LateCopier(device.copier, steps=1)
    ticket = late.submit([copy(0, 1)])
    late.tick()
    late.submit([copy(2, 2)])
    ticket.wait_on()
    assert device.secondary == [0, 10, 0, 0]


def test_no_steps_are_no_delay() -> None:
    """With 0 steps a batch is done when it is submitted."""
    device = Device()
    assert LateCopier(device.copier, steps=0).submit([copy(3, 0)]).done()
    assert device.secondary == [13, 0, 0, 0]


def test_chosen_batches_fail_with_half_of_their_bytes() -> None:
    """The chosen batch fails on done and wait after moving its first half; the others are whole."""
    device = Device()
    failing = FailingCopier(device.copier, which={1})
    assert failing.submit([copy(0, 0)]).done()
    bad = failing.submit([copy(1, 1), copy(2, 2)])
    assert failing.submit([copy(3, 3)]).done()
    for ask in (bad.done, bad.wait):
        with pytest.raises(CopyFailed, match="batch 1"):
            ask()
    bad.wait_on()
    assert device.secondary == [10, 11, 0, 13]


@pytest.mark.parametrize("outer", ["late", "failing"])
def test_a_failure_can_be_late(outer: str) -> None:
    """Combined either way around, a failure is known only after the ticks."""
    device = Device()
    if outer == "late":
        late = LateCopier(FailingCopier(device.copier, {0}), steps=1)
        ticket = late.submit([copy(0, 0)])
    else:
        late = LateCopier(device.copier, steps=1)
        ticket = FailingCopier(late, {0}).submit([copy(0, 0)])
    assert not ticket.done()
    late.tick()
    with pytest.raises(CopyFailed):
        ticket.done()
    assert device.secondary == [0, 0, 0, 0]
