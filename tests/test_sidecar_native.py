"""`kvcache publish` in the native format: readers know what the log says, whoever is killed."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from events.subscribe.continuity import Missed, Restarted
from events.subscribe.subscriber import NativeSubscriber
from kvcache.replay import replay
from tests.support.engines.sidecars import EngineProcess, Sidecar
from tests.support.feeds.native import FoldingReader
from tests.support.ports import free_port


def check(reader: FoldingReader, log: Path, seq: int) -> None:
    """The reader has the log's last batch, and the state that the log's own replay gives."""
    reader.read_until(lambda: reader.replayed.last_seq >= seq, f"batch {seq}")
    assert reader.replayed.fingerprint == replay(log, at=reader.replayed.last_seq).fingerprint
    assert reader.replayed.checkpoints_failed == []


def test_sidecar_and_engine_are_killed(tmp_path: Path) -> None:
    """A sidecar that comes again serves the same epoch, so readers go on; an engine that comes again begins another."""
    log = tmp_path / "log"
    live, replayed = free_port(), free_port()
    url = f"zmq+pub://127.0.0.1:{live}?format=native&replay={replayed}&heartbeat=200ms"
    with ExitStack() as stack:
        engine = EngineProcess(log, 1)
        stack.callback(lambda: engine.kill())
        sidecar = Sidecar(log, url)
        stack.callback(lambda: sidecar.kill())
        subscriber = NativeSubscriber(f"tcp://127.0.0.1:{live}", replay=f"tcp://127.0.0.1:{replayed}")
        early = stack.enter_context(closing(FoldingReader(subscriber)))
        _, seq = engine.settle()
        check(early, log, seq)
        for _ in range(2):
            engine.work()
            sidecar.kill()
            sidecar = Sidecar(log, url)
            _, seq = engine.settle()
            check(early, log, seq)
        assert not any(isinstance(each, Restarted) for each in early.others)
        epoch = early.replayed.state.epoch
        engine.kill()
        engine = EngineProcess(log, 2)
        _, seq = engine.settle()
        check(early, log, seq)
        assert early.replayed.state.epoch > epoch
        late = stack.enter_context(closing(FoldingReader(NativeSubscriber(f"tcp://127.0.0.1:{live}"))))
        check(late, log, seq)
        assert not any(isinstance(each, Missed) and not each.recovered for each in early.others)
        assert sidecar.process.poll() is None, sidecar.said
