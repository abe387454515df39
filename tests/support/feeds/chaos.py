"""What the chaos test of the router feed is made of: an engine that dies, routers that come and go, a lossy network.

Run as a program this is an engine in a process of its own, which can be killed like one.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zmq

from cuda_ops.copier import Copy, FinishedTicket, Ticket
from events.formats.vllm import Hash
from events.packed import NAME_BYTES
from events.subscribe.continuity import Missed, Received, Restarted
from events.subscribe.index import Index
from events.subscribe.subscriber import Subscriber
from kvcache import KVCacheConfig, KVCacheManager, Request
from kvcache.errors import CapacityError
from kvcache.fold.prefix_tree import Run
from kvcache.fold.state import CacheState
from sinks import SinkContext, SinkRunner, open_sink
from sinks.router.feed import FeedBatch, RouterFeed
from sinks.router.zmq import ZMQTransport
from tests.support.engines.simulated import LateCopier
from tests.support.forked import PIPE, Forked
from tests.support.places import landed_level
from tests.support.ports import free_port
from tests.support.waiting import WAIT, wait_until

CONFIG = KVCacheConfig(
    max_sequence_length=32,
    max_attention_window=(5, 32),
    tokens_per_block=2,
    primary_blocks=16,
    secondary_blocks=6,
    num_layers=2,
    num_kv_heads=1,
    head_dim=1,
    block_hash="v2_sha256_64",
)
RESERVATION = 16
"""Numbers reserved at a time: few, so that the end of a reservation is met, too."""
QUEUED_EVENTS = 60
"""Few, so that a sink that stalls loses something."""

Reported = set[tuple[int, int, Hash, Hash | None, tuple[Any, ...]]]
"""Group, level, name, parent and tokens of each resident full block."""


@dataclass(frozen=True)
class Site:
    """Where an engine is found, before and after a restart."""

    port: int
    replay_port: int
    state: str
    options: str

    @property
    def url(self) -> str:
        return (
            f"zmq+pub://127.0.0.1:{self.port}?replay={self.replay_port}&state={self.state}"
            f"&heartbeat=20ms&{self.options}"
        )

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    @classmethod
    def choose(cls, directory: Path, seed: int) -> Site:
        rng = random.Random(seed)
        ring, batch = ["1MiB", "4KiB", "0B"][seed % 3], rng.choice(["1KiB", "4KiB"])
        options = f"ring={ring}&max_batch={batch}&coalesce={rng.choice(['0', '2ms', '10ms'])}"
        return cls(free_port(), free_port(), str(directory / "feed.numbers"), options)


def residency(manager: KVCacheManager) -> Reported:
    """The landed full blocks of a manager."""
    size, width = CONFIG.tokens_per_block, manager.state.hashing.key_bytes
    reported: Reported = set()
    runs = [
        (index, run) for index, group in enumerate(manager.state.groups) for run in group.tree.runs.values()
    ]
    for index, run in runs:
        above = run.parent.key_of_last(width) if isinstance(run.parent, Run) else b""
        parent = int.from_bytes(above[:NAME_BYTES], "big") if above else None
        tokens = memoryview(bytes(run.symbols)).cast("i")
        for block in range(len(run.slots) - bool(run.partial)):
            name = int.from_bytes(run.keys[block * width : block * width + NAME_BYTES], "big")
            level = landed_level(manager.state, index, run, block)
            if level is not None:
                reported.add((index, level, name, parent, tuple(tokens[block * size : (block + 1) * size])))
            parent = name
    return reported


def announced_by(index: Index) -> Reported:
    """What an index holds, to be compared with a residency."""
    return {
        (group, level, name, block.parent, block.tokens)
        for (group, level), blocks in index.blocks.items()
        for name, block in blocks.items()
    }


class NoBytes:
    """Copies nothing, at once."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        return FinishedTicket()


class Engine:
    """A manager with a feed, at work on random requests. `previous` is the state that it goes on from.

    Copies land many steps late, but for a manager that goes on: it has none.
    """

    def __init__(self, site: Site, rng: random.Random, previous: CacheState | None = None) -> None:
        context = SinkContext(8, CONFIG.tokens_per_block)
        feed = open_sink(site.url, context)
        assert isinstance(feed, RouterFeed)
        self.feed = feed
        self.feed._numbers._step = RESERVATION
        transport = feed.transport
        assert isinstance(transport, ZMQTransport)
        self.transport = transport
        self._gate = threading.Event()
        self._gate.set()
        self._write = feed.write
        feed.write = self._write_when_allowed  # type: ignore[method-assign]
        self.runner = SinkRunner(feed, "feed", max_events=QUEUED_EVENTS, backoff_seconds=0.01)
        self.copier = LateCopier(NoBytes(), steps=7)
        if previous is None:
            self.manager = KVCacheManager(CONFIG, sinks=[self.runner], copier=self.copier)
        else:
            self.manager = KVCacheManager.resume(previous, sinks=[self.runner])
        self.rng = rng
        self.running = [int(request) for request in self.manager.state.handles]
        self._next_id = max(self.running, default=0) + 1
        self._made_up = 0

    # -- work

    def step(self) -> None:
        """A command, and mostly a flush. A refusal for lack of room is part of life."""
        rng = self.rng
        command = rng.choice([self._add] * 3 + [self._compute] * 2 + [self._decode] * 3 + [self._remove] * 2)
        try:
            command()
        except CapacityError:
            self._remove()
        self._move()
        if rng.random() < 0.003:
            self.manager.clear()
        if rng.random() < 0.7:
            self.manager.flush()

    def _move(self) -> None:
        self.manager.start_transfers()
        self.copier.tick()

    def _add(self) -> None:
        rng = self.rng
        salt = rng.choice([None, None, "salt"])
        prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 14))]
        request = Request(self._next_id, prompt, cache_salt=salt)
        self.manager.add_sequences([request])
        self.running.append(self._next_id)
        self._next_id += 1

    def _compute(self) -> None:
        if self.running:
            request = self.rng.choice(self.running)
            sequence = self.manager.state.sequences[self.manager.state.handles[request]]
            computed = self.rng.randrange(sequence.computed, sequence.num_tokens + 1)
            self.manager.store_context_blocks(request, computed)

    def _decode(self) -> None:
        if self.running:
            chosen = self.rng.sample(self.running, self.rng.randrange(1, len(self.running) + 1))
            self.manager.add_tokens(chosen, [self.rng.randrange(1, 3) for _ in chosen])

    def _remove(self) -> None:
        if self.running:
            self.manager.remove_sequence(self.running.pop(self.rng.randrange(len(self.running))))

    # -- misfortune

    def _write_when_allowed(self, batch: object) -> None:
        self._gate.wait()
        self._write(batch)  # type: ignore[arg-type]

    def stall(self) -> None:
        """The sink's thread hangs."""
        self._gate.clear()

    def go_on(self) -> None:
        """It does not any more."""
        self._gate.set()

    def fail_once(self) -> None:
        """The next batch on its way out is lost, with its number."""

        def fail(batch: FeedBatch) -> None:
            del self.transport.send
            self._made_up += 1
            raise OSError(5, "made up")

        self.transport.send = fail  # type: ignore[method-assign]

    def stop(self) -> None:
        """An orderly end."""
        self.go_on()
        self._end()

    def kill(self) -> None:
        """An end as by SIGKILL: what is queued or held back is lost, and no number is given back."""
        self.feed.close = self._abandon  # type: ignore[method-assign]
        self.runner.state = "quarantined"
        self.runner._queue.refuse("killed")
        self.runner._queue.drop_all("killed")
        self.go_on()
        self._end()

    def _end(self) -> None:
        self.manager.close()
        self._check_errors()

    def _check_errors(self) -> None:
        assert self.runner.stats().errors == self._made_up, self.runner.stats()

    def _abandon(self) -> None:
        assert self.transport.replay is not None
        self.transport.replay.stop()
        self.transport._context.destroy(linger=0)
        self.feed._numbers._file.close()  # type: ignore[union-attr]

    # -- the end

    def settle(self) -> tuple[Reported, int]:
        """Wait until all is told; returns what is resident, and the number up to which that is told."""
        self.go_on()
        wait_until(self._is_reported, f"the feed does not come to rest: {self.runner.stats()}")
        self.manager.check()
        self._check_errors()
        return residency(self.manager), self.feed._numbers.next - 1

    def _is_reported(self) -> bool:
        self._move()
        if self.manager.flush() is not None or self.manager.state.transfers:
            return False
        stats, feed = self.runner.stats(), self.feed
        # One that has just failed by misfortune is tried again by itself.
        assert stats.state in ("running", "failing"), stats
        failing = stats.state == "failing"
        waits = (
            failing
            or feed.resync_after_seq is not None
            or feed._pending
            or feed._resync_due
            or self.runner._owed
        )
        return stats.lag_batches == 0 and not waits and not self.runner._queue._items


class ChildEngine:
    """An engine in another process, which works by itself and can be killed in earnest."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        arguments = [site.port, site.replay_port, site.state, site.options, rng.randrange(1 << 30)]
        self._process = Forked("tests.support.feeds.chaos", *arguments, stdin=PIPE, stdout=PIPE, stderr=2)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        if self._stdout.readline() != "ready\n":
            self.kill()
            raise AssertionError("the engine did not start")

    def step(self) -> None:
        """Does so by itself."""

    def stall(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def fail_once(self) -> None:
        self._say("fail")

    def stop(self) -> None:
        self.go_on()
        self._say("stop")
        assert self._process.wait(WAIT) == 0
        self._close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT)
        self._close()

    def settle(self) -> tuple[Reported, int]:
        self.go_on()
        self._say("settle")
        answer = self._stdout.readline()
        assert answer, "the engine died"
        blocks, last_seq = json.loads(answer)
        return {(*place, tuple(tokens)) for *place, tokens in blocks}, last_seq

    def _say(self, word: str) -> None:
        print(word, file=self._stdin, flush=True)

    def _close(self) -> None:
        self._stdin.close()
        self._stdout.close()


class Router:
    """Follows an engine as a router does. What it lost for good makes it begin anew."""

    def __init__(self, endpoint: str, site: Site) -> None:
        self._endpoint, self._site = endpoint, site
        self.asleep = 0
        """Rounds for which it does not look."""
        self.next_seq = 0
        self.index = Index()
        self.subscriber: Subscriber | None = None
        self.faults: list[str] = []
        self.restarted = self.recovered = 0
        self.resumes = False
        """Whether it has come back with what it knew, and received nothing since."""

    def connect(self, *, anew: bool) -> None:
        """Come, or come back: with what it knew, or without."""
        self.leave()
        self.resumes = not anew
        if anew:
            self.index, self.next_seq = Index(), 0
        # Patience is short, because a publisher that was killed will not end its answer.
        with patch("events.subscribe.subscriber.MAX_QUEUED", 1000):
            self.subscriber = Subscriber(
                self._endpoint, replay=self._site.replay_endpoint, start=self.next_seq, replay_timeout=0.3
            )

    def leave(self) -> None:
        if self.subscriber is not None:
            self.subscriber.close()
        self.subscriber = None

    def look(self, timeout_ms: int) -> None:
        """Take in what is there."""
        if self.asleep or self.subscriber is None:
            self.asleep = max(0, self.asleep - 1)
            return
        for report in self.subscriber.poll(timeout_ms):
            if isinstance(report, Missed) and not report.recovered:
                self.restarted += 1
                self.connect(anew=True)
                return
            if isinstance(report, Restarted) and not self.resumes:
                self.faults.append(f"restarted at {self.next_seq - 1}")
            # To one who resumes, a live message that is late looks like a publisher that began anew.
            self.resumes = False
            self.index.fold(report)
            if isinstance(report, Received):
                self.next_seq = report.seq + 1
                self.recovered += report.replayed
            self._note_faults()

    def _note_faults(self) -> None:
        index = self.index
        for fault in ("orphans", "repeated_stores", "unknown_removals", "unknown_events"):
            if getattr(index, fault):
                self.faults.append(f"{fault} at {self.next_seq - 1}")
                setattr(index, fault, 0)

    def has_received(self, seq: int) -> bool:
        """Whether it knows all up to this number: in the middle of an answer, which tells a state piece by piece and
        gives the pieces the numbers of what they stand for, it may have the number and not yet the state.
        """
        is_asking = self.subscriber is not None and self.subscriber._follower.asking is not None
        return self.next_seq > seq and not is_asking

    @property
    def reported(self) -> Reported:
        """What it believes to be resident."""
        return announced_by(self.index)


class LossyForwarder:
    """A network between the engine and routers that loses a part of the messages."""

    def __init__(self, endpoint: str, rng: random.Random) -> None:
        self.loss = 0.0
        self._rng = rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(b"")
        self._in.connect(endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out.bind("tcp://127.0.0.1:*")
        self.endpoint = self._out.get_string(zmq.LAST_ENDPOINT)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._in.poll(20):
                frames = self._in.recv_multipart()
                if self._rng.random() >= self.loss:
                    self._out.send_multipart(frames)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


class HalfReader:
    """Asks for everything, and reads only a part of the answer."""

    def __init__(self, site: Site) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.rcvhwm = 1
        self._socket.connect(site.replay_endpoint)
        self._socket.send_multipart([b"", bytes(8)])

    def read(self) -> None:
        """One message, if there is one."""
        if self._socket.poll(0):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


def main(port: str, replay_port: str, state: str, options: str, seed: str) -> None:
    """Work until told what to do."""
    engine = Engine(Site(int(port), int(replay_port), state, options), random.Random(int(seed)))
    print("ready", flush=True)
    while True:
        if not select.select([0], [], [], 0.001)[0]:
            engine.step()
            continue
        # Unbuffered, so that `select` tells of every word.
        for word in os.read(0, 4096).decode().split() or ["stop"]:
            if word == "fail":
                engine.fail_once()
            elif word == "stop":
                engine.stop()
                return
            else:
                reported, last_seq = engine.settle()
                print(json.dumps([sorted(reported, key=str), last_seq]), flush=True)
                sys.stdin.read()
                engine.stop()
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
