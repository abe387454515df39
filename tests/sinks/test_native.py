"""``zmq+pub:…?format=native``: all events of a cache over ZeroMQ; readers fold them to what the manager knows."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import sinks.router.replay
from events.codec import batch_without_tokens, decode_batch, encode_batch
from events.formats.native import NativeCodec
from events.formats.vllm import Message
from events.log import LogReader, LogWriter
from events.subscribe.continuity import Missed, NativeContinuity, ReceivedBatch, Restarted, Restated
from events.subscribe.subscriber import NativeSubscriber
from events.types import CacheCreated, EpochStarted, EventBatch, Gap, StateExported
from sinks import SinkContext, SinkOpenError, SinkRunner, open_sink
from sinks.base import SinkURLError
from sinks.router.native import NativeFeed
from tests.support.feeds.native import Cache, FoldingReader
from tests.support.feeds.native_feed import CONTEXT, Batches, Sent, sent_by_a_cache
from tests.support.feeds.workers import read_answer
from tests.support.secrets import TOKENS, betrayed
from tests.support.waiting import WAIT_MS, wait_until

URL = "zmq+pub://127.0.0.1:0?format=native&replay=0&heartbeat=200ms"


def transport(cache: Cache) -> Any:
    return cache.manager.feeds[0].transport


def reader_of(cache: Cache, *, replay: bool = True) -> FoldingReader:
    there = transport(cache)
    subscriber = NativeSubscriber(there.endpoint, replay=there.replay_endpoint if replay else None)
    return FoldingReader(subscriber)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("tokens", [0, 1])
def test_readers_know_what_the_manager_knows(stack: ExitStack, tmp_path: Path, tokens: int) -> None:
    """One from the start and a late one; with tokens or without, every checkpoint on the way agrees."""
    cache = stack.enter_context(closing(Cache(f"{URL}&tokens={tokens}", log=tmp_path / "log")))
    early = reader_of(cache)
    stack.enter_context(closing(early))
    cache.steps(150)
    early.check(cache)
    late = reader_of(cache, replay=False)
    stack.enter_context(closing(late))
    late.check(cache)
    assert len(late.batches) == 1
    cache.steps(150)
    for reader in (early, late):
        reader.check(cache)
        assert reader.others == []
        assert reader.replayed.checkpoints_verified > 5
        assert reader.replayed.state.tokens_recorded == bool(tokens)


def test_messages_are_the_batches_of_the_log(stack: ExitStack, tmp_path: Path) -> None:
    """Whoever is there from the start gets, batch for batch, what the log holds."""
    cache = Cache(f"{URL}&tokens=1", log=tmp_path / "log")
    with closing(reader_of(cache)) as reader, closing(cache):
        wait_until(lambda: cache.manager.feeds[0].subscribers == 1)
        cache.steps(80)
        reader.check(cache)
    logged = list(LogReader(tmp_path / "log"))
    first = reader.batches[0]
    at = first.seq + 1
    assert reader.batches[1:] == logged[at : len(reader.batches) - 1 + at]
    assert [type(event) for event in first.events[:3]] == [EpochStarted, CacheCreated, StateExported]


def test_json_is_what_files_have(stack: ExitStack, tmp_path: Path) -> None:
    """An object for each batch, as in `file:`; the one for who comes late tells the state and all that follows it."""
    lines = tmp_path / "events.jsonl"
    cache = stack.enter_context(closing(Cache(URL.replace("native", "native-json"), f"file:{lines}")))
    context = stack.enter_context(zmq.Context())
    early, late = (stack.enter_context(context.socket(zmq.SUB)) for _ in range(2))
    early.connect(transport(cache).endpoint)
    early.subscribe("")
    reported = {}
    assert early.poll(WAIT_MS)
    state = msgspec.json.decode(early.recv_multipart()[2])
    assert state["seq"] == cache.last_seq
    cache.steps(40)
    while cache.last_seq not in reported:
        assert early.poll(WAIT_MS)
        message = msgspec.json.decode(early.recv_multipart()[2])
        if message["events"]:
            reported[message["seq"]] = message
    wait_until(lambda: len(lines.read_bytes().splitlines()) == cache.last_seq + 1)
    for line in map(msgspec.json.decode, lines.read_bytes().splitlines()[1:]):
        assert reported[line["seq"]] == line
    beginning = ["EpochStarted", "CacheCreated", "StateExported"]
    for _ in range(2):  # the second time the state is there already, and what came since is put behind it
        late.connect(transport(cache).endpoint)
        late.subscribe("")
        assert late.poll(WAIT_MS)
        state = msgspec.json.decode(late.recv_multipart()[2])
        assert state["seq"] == cache.last_seq
        assert [event["type"] for event in state["events"]][:3] == beginning
        late.close()
        late = stack.enter_context(context.socket(zmq.SUB))
        cache.steps(3)
        wait_until(lambda: cache.manager.sink_stats()[0].lag_batches == 0)


class TestLosses:
    """Messages are lost on the way, where the reader cannot notice but by their numbers."""

    @pytest.mark.parametrize("replay", [True, False])
    def test_reader_that_loses_messages(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, replay: bool
    ) -> None:
        """With a replay it gets what it missed; without one it asks for the state by subscribing anew."""
        monkeypatch.setattr("events.subscribe.subscriber._ASK_AGAIN_SECONDS", 0.05)
        cache = stack.enter_context(closing(Cache(URL)))
        reader = reader_of(cache, replay=replay)
        stack.enter_context(closing(reader))
        reader.check(cache)
        lose(reader.subscriber, random.Random(3), 0.1)
        for _ in range(8):
            cache.steps(20)
            reader.check(cache)
        missed = [report for report in reader.others if isinstance(report, Missed)]
        assert missed
        assert all(report.recovered == replay for report in missed)
        assert any(isinstance(report, Restated) for report in reader.others) != replay
        if replay:
            seqs = [batch.seq for batch in reader.batches]
            assert seqs == list(range(seqs[0], seqs[-1] + 1))

    def test_older_than_the_ring(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then the replay tells the state, and what came since."""
        monkeypatch.setattr(sinks.router.replay, "MIN_TAIL_BYTES", 0)
        cache = stack.enter_context(closing(Cache(f"{URL}&ring=4KiB")))
        reader = reader_of(cache)
        stack.enter_context(closing(reader))
        reader.check(cache)
        lost = lose(reader.subscriber, random.Random(1), 1.0)
        cache.steps(100)
        wait_until(lambda: cache.manager.sink_stats()[0].lag_batches == 0)
        last = cache.manager.feeds[0].last_seq
        reader.read_until(lambda: lost.seq >= last)
        lost.share = 0.0
        cache.steps(5)
        reader.check(cache)
        assert any(isinstance(report, Restated) for report in reader.others)
        assert not any(isinstance(report, Missed) for report in reader.others)

    def test_sink_that_lags(self, stack: ExitStack) -> None:
        """What the sink itself has lost the manager makes good, and readers go on with the state that it tells."""
        sink = open_sink(f"{URL}&tokens=1", CONTEXT)
        assert isinstance(sink, NativeFeed)
        cache = stack.enter_context(closing(Cache(SinkRunner(sink, "native", max_events=40))))
        reader = reader_of(cache)
        stack.enter_context(closing(reader))
        cache.steps(5)
        reader.check(cache)
        writing = threading.Event()
        send = sink.transport.send
        sink.transport.send = lambda batch: (writing.wait(), send(batch))  # type: ignore[method-assign,assignment]
        cache.steps(60)
        writing.set()
        wait_until(lambda: sink.resync_after_seq is not None)
        wait_until(lambda: cache.manager.sink_stats()[0].lag_batches == 0)
        cache.steps(2)
        reader.check(cache)
        assert any(isinstance(event, Gap) for batch in reader.batches for event in batch.events)
        assert cache.manager.sink_stats()[0].dropped_batches


class Loss:
    """Takes messages away before they are read."""

    def __init__(self, receive: Any, rng: random.Random, share: float) -> None:
        self._receive, self._rng, self.share = receive, rng, share
        self.seq = -1
        """The number of the last one that was lost."""

    def __call__(self) -> list[bytes] | None:
        while (frames := self._receive()) is not None and self._rng.random() < self.share:
            self.seq = int.from_bytes(frames[1], "big")
        return frames


def lose(subscriber: Any, rng: random.Random, share: float) -> Loss:
    loss = Loss(subscriber._live.receive, rng, share)
    subscriber._live.receive = loss
    return loss


class TestRestarts:
    def test_without_a_log(self, stack: ExitStack) -> None:
        """A cache begins anew behind the same port: that is reported, and what is known is the new one."""
        cache = Cache(URL)
        endpoint = transport(cache).endpoint
        with closing(reader_of(cache, replay=False)) as reader:
            with closing(cache):
                cache.steps(30)
                reader.check(cache)
            again = Cache(URL.replace("127.0.0.1:0", endpoint.removeprefix("tcp://")), seed=9)
            with closing(again):
                again.steps(10)
                reader.read_until(lambda: any(isinstance(each, Restarted) for each in reader.others))
                reader.check(again)
        assert len(reader.others) == 1

    def test_with_a_log_that_is_continued(self, stack: ExitStack, tmp_path: Path) -> None:
        """The next epoch of the log is another origin, whose first batch tells what has survived."""
        url = f"{URL}&state=&first=1"
        cache = Cache(url, log=tmp_path / "log")
        endpoint = transport(cache).endpoint
        with closing(reader_of(cache)) as reader:
            with closing(cache):
                cache.steps(30)
                reader.check(cache)
            again = Cache(
                url.replace("127.0.0.1:0", endpoint.removeprefix("tcp://")),
                log=LogWriter(tmp_path / "log", resume=True),
            )
            with closing(again):
                again.steps(10)
                reader.check(again)
                reader.read_until(lambda: any(isinstance(each, Restarted) for each in reader.others))


def until(socket: zmq.Socket[bytes], last: int) -> list[bytes]:
    """The payloads up to that number."""
    payloads, seq = [], -1
    while seq < last:
        assert socket.poll(WAIT_MS)
        _, number, payload = socket.recv_multipart()
        seq = int.from_bytes(number, "big")
        payloads.append(payload)
    return payloads


def test_no_token_and_no_salt_is_reported(stack: ExitStack) -> None:
    """Unless asked for: in no live message, no state, no replay."""
    silent = URL.replace("200ms", "0")
    cache = stack.enter_context(closing(Cache(silent, tokens=TOKENS[:6])))
    there = transport(cache)
    context = stack.enter_context(zmq.Context())
    early, asking = (stack.enter_context(context.socket(kind)) for kind in (zmq.SUB, zmq.DEALER))
    early.connect(there.endpoint)
    early.subscribe("")
    wait_until(lambda: cache.manager.feeds[0].subscribers == 1)
    cache.steps(60)
    wait_until(lambda: cache.manager.sink_stats()[0].lag_batches == 0)
    late = stack.enter_context(context.socket(zmq.SUB))
    late.connect(there.endpoint)
    late.subscribe("")
    asking.connect(there.replay_endpoint)
    asking.send_multipart([b"", bytes(8)])
    reported = {
        name: until(socket, cache.manager.feeds[0].last_seq)
        for name, socket in (("early", early), ("late", late))
    }
    reported["asking"] = [frames[-1] for frames in read_answer(asking)]
    for name, least in (("early", 50), ("late", 1), ("asking", 1)):
        assert len(reported[name]) >= least
        assert not any(map(betrayed, reported[name]))
    with (
        closing(Cache(f"{URL}&tokens=1", tokens=TOKENS[:6])) as publishing,
        closing(reader_of(publishing)) as reader,
    ):
        publishing.steps(10)
        reader.check(publishing)
        assert betrayed(b"".join(map(encode_batch, reader.batches)))


class TestURLs:
    @pytest.mark.parametrize("option", ["salts=plain", "coalesce=1s", "pad=1", "max_batch=1KiB", "engine=e"])
    def test_options_of_other_formats(self, option: str) -> None:
        """They would do nothing, and whoever gave them expects something."""
        with pytest.raises(
            SinkURLError, match=rf"{option.partition('=')[0]}= does not apply to format=native"
        ):
            open_sink(f"{URL}&{option}", CONTEXT)

    @pytest.mark.parametrize("scheme", ["zmq+pub", "nats", "kafka", "redis"])
    def test_unknown_format(self, scheme: str) -> None:
        """Names those that there are."""
        with pytest.raises(SinkURLError, match="format must be one of vllm, vllm-array, sglang, native"):
            open_sink(f"{scheme}://127.0.0.1?format=avro", CONTEXT)

    def test_without_a_cache(self) -> None:
        """Nobody can tell its state."""
        runner = SinkRunner(open_sink(URL, SinkContext(32, 4)), "native")
        with pytest.raises(SinkOpenError, match="format=native publishes a cache"):
            runner.start()

    def test_neither_tokens_nor_names(self) -> None:
        """Blocks could not be told apart."""
        with pytest.raises(SinkOpenError, match="requires block names"):
            Cache(URL, block_hash="none")


# --- the order of things, without sockets ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_nobody_is_wrong(seed: int) -> None:
    """Messages are lost, come twice, and states are told at any time: what is known is what was so at some batch."""
    rng = random.Random(seed)
    sent, cache = sent_by_a_cache(seed)
    truth = FoldingReader(None)  # type: ignore[arg-type]
    continuity, reader = NativeContinuity(), FoldingReader(None)  # type: ignore[arg-type]
    states = {state.seq: state for state in sent.states}
    prints = {}
    for message in sent.messages:
        truth.replayed.fold(decode_batch(message.payload), verify=True)
        prints[truth.replayed.last_seq] = truth.replayed.fingerprint
        if rng.random() < 0.9:
            continuity.live(message)
        if message.seq in states and rng.random() < 0.2:
            continuity.live(states[message.seq])
        if rng.random() < 0.1:
            continuity.live(rng.choice(sent.messages[: message.seq + 1]))
        reader.take(continuity.take())
        if reader.replayed.batches:
            assert reader.replayed.fingerprint == prints[reader.replayed.last_seq]
    continuity.live(sent.states[-1])
    reader.take(continuity.take())
    assert reader.replayed.fingerprint == cache.fingerprint
    assert not reader.replayed.checkpoints_failed
    assert any(isinstance(report, Missed) for report in reader.others)


@pytest.mark.parametrize("seed", range(4))
def test_replays_fill_in(seed: int) -> None:
    """A publisher that can be asked answers with what it has, or its state; then every reader knows the end."""
    rng = random.Random(seed)
    sent, cache = sent_by_a_cache(seed)
    continuity, reader = NativeContinuity(can_ask=True), FoldingReader(None)  # type: ignore[arg-type]
    continuity.live(sent.messages[0])
    for at, message in enumerate(sent.messages[1:], 1):
        if rng.random() < 0.8 or at == len(sent.messages) - 1:
            continuity.live(message)
        start = continuity.take_request()
        if start is None:
            continue
        if rng.random() < 0.3:
            continuity.answer([state for state in sent.states if state.seq <= at][-1])
        for answer in sent.messages[start : at + 1]:
            continuity.answer(answer)
        continuity.end_of_replay()
        reader.take(continuity.take())
    reader.take(continuity.take())
    assert reader.replayed.fingerprint == cache.fingerprint
    assert not continuity.waiting
    assert not any(isinstance(each, Missed) and not each.recovered for each in reader.others)


def test_a_state_that_is_known_is_not_handed_out() -> None:
    """Told again, by a publisher that was started anew too, under numbers further on, it is passed over."""
    sent, _ = sent_by_a_cache(6)
    continuity = NativeContinuity()
    for message in sent.messages[:9]:
        continuity.live(message)
    assert len(continuity.take()) == 9
    continuity.live(sent.states[8])
    continuity.live(sent.states[8]._replace(seq=1000))
    continuity.live(sent.messages[9]._replace(seq=1001))
    (report,) = continuity.take()
    assert isinstance(report, ReceivedBatch)
    assert report.batch == decode_batch(sent.messages[9].payload)


def test_what_is_no_batch_is_missed() -> None:
    """It is said so, with what to do about JSON; the next state is what goes on."""
    sent, cache = sent_by_a_cache(3)
    continuity, reader = NativeContinuity(), FoldingReader(None)  # type: ignore[arg-type]
    for message in sent.messages[:5]:
        continuity.live(message)
    continuity.live(Message(b"t", 5, b'{"seq":5}'))
    continuity.live(sent.messages[6])
    assert continuity.waiting
    continuity.live(sent.states[-1])
    reader.take(continuity.take())
    reasons = [report.reason for report in reader.others if isinstance(report, Missed)]
    assert reasons == ["it is JSON: readers of this software require format=native"]
    assert reader.replayed.fingerprint == cache.fingerprint


def test_heartbeats_say_what_is_missing() -> None:
    """A heartbeat names the last batch, so silence behind a lost one is not taken for rest."""
    sent, _ = sent_by_a_cache(4)
    continuity = NativeContinuity()
    for message in sent.messages[:8]:
        continuity.live(message)
    last = decode_batch(sent.messages[7].payload).seq
    continuity.live(Message(b"t", 8, encode_batch(EventBatch(last, 0, ()))))
    assert not continuity.waiting
    continuity.live(Message(b"t", 10, encode_batch(EventBatch(last + 1, 0, ()))))
    assert continuity.waiting
    assert isinstance(continuity.take()[-1], Missed)


@pytest.mark.parametrize("codec", [NativeCodec("msgpack", 32), NativeCodec("json", 32)])
def test_joined_messages_say_the_same(codec: NativeCodec) -> None:
    """Several as one, from the last state or gap on, with the number of the last."""
    sent, _ = sent_by_a_cache(5)
    batches = [decode_batch(message.payload) for message in sent.messages if message.payload]
    batches = [batch for batch in batches if batch.events]
    state = decode_batch(sent.states[20].payload)
    batches = [*batches[:5], state, *[batch for batch in batches if state.seq < batch.seq]]
    joined = codec.join([codec.encode(batch) for batch in batches])
    whole = EventBatch(batches[-1].seq, batches[-1].ts, tuple(e for b in batches[5:] for e in b.events))
    assert joined == codec.encode(whole)
    assert codec.join([joined]) == joined


def test_epoch_says_whether_tokens_are_reported() -> None:
    """Whatever the log has: who folds the stream must know."""
    for tokens in (False, True):
        kept = Batches()
        with closing(Cache(kept)) as cache:
            cache.steps(5)
        batches = [decode_batch(message.payload) for message in Sent(kept.batches, tokens=tokens).messages]
        (started,) = [event for batch in batches for event in batch.events if isinstance(event, EpochStarted)]
        assert started.tokens_recorded is tokens
        assert any(batch_without_tokens(batch) != batch for batch in batches) is tokens
