"""The vocabulary of copies and tickets."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from cuda_ops.copier import Copy, CopyFailed, FinishedTicket, JoinedTicket, Ticket


class OpenTicket:
    """A batch under way, which ends when it is waited for."""

    def __init__(self, failure: str | None = None) -> None:
        self.ended = False
        self.failure = failure
        self.waited_on: list[object] = []

    def done(self) -> bool:
        return self.ended and FinishedTicket(self.failure).done()

    def wait(self) -> None:
        self.ended = True
        self.done()

    def wait_on(self, stream: object = None) -> None:
        self.waited_on.append(stream)


def test_a_copy_needs_pairs() -> None:
    """Sources without as many targets are refused."""
    with pytest.raises(ValueError, match="of equal length"):
        Copy(0, 1, np.zeros(2, np.int32), np.zeros(3, np.int32))


def test_a_copy_needs_slots_from_zero() -> None:
    """A negative slot, which would count from the end of a tensor, is refused."""
    with pytest.raises(ValueError, match="must not be negative"):
        Copy(0, 1, np.array([0], np.int32), np.array([-1], np.int32))


def test_only_a_copy_onto_itself_moves_nothing() -> None:
    """The same slot number at another level is another slot."""
    slots = np.array([1, 2], np.int32)
    assert Copy(0, 0, slots, slots.copy()).moves_nothing
    assert not Copy(1, 0, slots, slots).moves_nothing
    assert not Copy(0, 0, slots, slots + 2).moves_nothing


def test_a_joined_ticket_is_done_when_all_are() -> None:
    """One open batch keeps the whole open; both sides are waited for on the device."""
    first, second = OpenTicket(), OpenTicket()
    joined: Ticket = JoinedTicket([FinishedTicket(), first, second])
    first.wait()
    assert not joined.done()
    joined.wait_on("stream")
    joined.wait()
    assert joined.done()
    assert first.waited_on == second.waited_on == ["stream"]


def test_waiting_for_a_joined_ticket_ends_all_before_it_fails() -> None:
    """After a failure was raised by wait, nothing is under way any more."""
    failing, last = OpenTicket("broken"), OpenTicket()
    joined = JoinedTicket([failing, last])
    with pytest.raises(CopyFailed, match="broken"):
        joined.wait()
    assert last.done()
    with pytest.raises(CopyFailed):
        joined.done()


def test_copy_failed_survives_pickling() -> None:
    """The reason is still there on the other side."""
    failure: CopyFailed = pickle.loads(pickle.dumps(CopyFailed("broken")))
    assert (failure.reason, str(failure)) == ("broken", "broken")


def test_planning_needs_no_torch() -> None:
    """The package, the protocol and the scheduling work where torch is not installed."""
    code = "import sys, cuda_ops, cuda_ops.hazards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
