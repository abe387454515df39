"""The ring of batches that readers may ask for again."""

from __future__ import annotations

import threading

import pytest

from sinks.router.replay import ENTRY_BYTES, ReplayRing


def ring_of(*sizes: int, first: int = 0, max_bytes: int = 1 << 20) -> ReplayRing:
    ring = ReplayRing(max_bytes)
    ring.start(first)
    for seq, size in enumerate(sizes, first):
        ring.append(seq, bytes([seq % 256]) * size)
    return ring


def test_gives_what_it_holds() -> None:
    """Each batch is found by its number."""
    ring = ring_of(1, 2, 3, first=7)
    assert [ring.get(seq) for seq in (7, 8, 9)] == [b"\x07", b"\x08" * 2, b"\x09" * 3]


def test_future_and_past_are_distinguished() -> None:
    """What was not sent yet, and what it does not hold any more, is not there; the next number says which it is."""
    ring = ring_of(1, 2, first=7)
    assert (ring.get(9), ring.get(10**30), ring.get(6), ring.next_seq) == (None, None, None, 9)
    empty = ring_of(first=7)
    assert (empty.get(7), empty.get(6), empty.next_seq) == (None, None, 7)


@pytest.mark.parametrize("size", [0, 1, 50, 1000])
def test_is_bounded_in_bytes(size: int) -> None:
    """Whatever the sizes, no more is held than allowed, and it is the latest."""
    ring = ring_of(*[size] * 100, max_bytes=1500)
    held = 1500 // (size + ENTRY_BYTES)
    assert all(ring.get(seq) is not None for seq in range(100 - held, 100))
    assert ring.get(100 - held - 1) is None


def test_a_batch_larger_than_the_ring_empties_it() -> None:
    """The bound holds for a single batch too; the numbers go on."""
    ring = ring_of(10, 10, 5000, max_bytes=1000)
    assert (ring.get(0), ring.get(1), ring.get(2), ring.next_seq) == (None, None, None, 3)
    ring.append(3, b"x")
    assert ring.get(3) == b"x"


def test_a_hole_in_the_numbers_is_not_bridged() -> None:
    """What is held is always contiguous: before a number that never came, nothing is known."""
    ring = ring_of(1, 1)
    ring.append(5, b"x")
    assert all(ring.get(seq) is None for seq in range(5))
    assert ring.get(5) == b"x"


def test_readers_see_right_payloads_while_it_is_written() -> None:
    """Whatever a reader finds on another thread is the payload of the number that it asked for."""
    ring = ring_of(max_bytes=20_000)
    stop = threading.Event()
    problems: list[object] = []
    found = 0

    def read() -> None:
        nonlocal found
        while not stop.is_set():
            seq = max(0, ring.next_seq - 20)
            payload = ring.get(seq)
            found += payload is not None
            if payload not in (None, b"%d" % seq):
                problems.append((seq, payload))

    thread = threading.Thread(target=read)
    thread.start()
    seq = 0
    while found < 50 or seq < 5000:
        ring.append(seq, b"%d" % seq)
        seq += 1
    stop.set()
    thread.join()
    assert problems == []
