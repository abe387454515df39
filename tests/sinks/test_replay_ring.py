"""The ring of batches that readers may ask for again."""

from __future__ import annotations

import threading

import pytest

from sinks.replay_ring import ENTRY_BYTES, ReplayRing


def ring_of(*sizes: int, first: int = 0, max_bytes: int = 1 << 20) -> ReplayRing:
    ring = ReplayRing(max_bytes)
    ring.start(first)
    for seq, size in enumerate(sizes, first):
        ring.append(seq, bytes([seq % 256]) * size)
    return ring


def test_gives_everything_from_a_number_on() -> None:
    """Batches come with their numbers, in order, from the one asked for to the latest."""
    ring = ring_of(1, 2, 3, first=7)
    assert ring.since(8) == [(8, b"\x08" * 2), (9, b"\x09" * 3)]
    assert ring.since(7) == [(7, b"\x07"), (8, b"\x08" * 2), (9, b"\x09" * 3)]


def test_tells_the_future_from_the_past() -> None:
    """The next number and those beyond are an empty answer; what it does not hold any more is none at all."""
    ring = ring_of(1, 2, first=7)
    assert ring.since(9) == ring.since(10**30) == []
    assert ring.since(6) is None
    empty = ring_of(first=7)
    assert empty.since(7) == []
    assert empty.since(6) is None


@pytest.mark.parametrize("size", [0, 1, 50, 1000])
def test_is_bounded_in_bytes(size: int) -> None:
    """Whatever the sizes, no more is held than allowed, and it is the latest."""
    ring = ring_of(*[size] * 100, max_bytes=1500)
    assert ring.bytes_held <= 1500
    held = 1500 // (size + ENTRY_BYTES)
    assert ring.since(100 - held) is not None
    assert ring.since(100 - held - 1) is None


def test_a_batch_larger_than_the_ring_empties_it() -> None:
    """The bound holds for a single batch too; the numbers go on."""
    ring = ring_of(10, 10, 5000, max_bytes=1000)
    assert ring.bytes_held == 0
    assert ring.since(2) is None
    assert ring.since(3) == []
    ring.append(3, b"x")
    assert ring.since(3) == [(3, b"x")]


def test_a_hole_in_the_numbers_is_not_bridged() -> None:
    """What is given is always contiguous: before a number that never came, nothing is known."""
    ring = ring_of(1, 1)
    ring.append(5, b"x")
    assert all(ring.since(seq) is None for seq in range(5))
    assert ring.since(5) == [(5, b"x")]


def test_readers_see_whole_answers_while_it_is_written() -> None:
    """Whatever a reader gets on another thread is contiguous from where it asked, and each payload is its number's."""
    ring = ring_of(max_bytes=20_000)
    stop = threading.Event()
    problems: list[object] = []
    answers = 0

    def read() -> None:
        nonlocal answers
        start = 0
        while not stop.is_set():
            found = ring.since(start)
            if found is None:
                start += 50
                continue
            expected = [(seq, b"%d" % seq) for seq in range(start, start + len(found))]
            if found != expected:
                problems.append(found)
            answers += bool(found)

    thread = threading.Thread(target=read)
    thread.start()
    seq = 0
    while answers < 50 or seq < 5000:
        ring.append(seq, b"%d" % seq)
        seq += 1
    stop.set()
    thread.join()
    assert problems == []
