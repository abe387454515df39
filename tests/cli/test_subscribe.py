"""`kvcache subscribe` at a real publisher."""

from __future__ import annotations

import json
import math
import signal
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from unittest.mock import Mock

import pytest

from kvcache.cli.process import StopSignals
from kvcache.cli.subscribe.sources import receive
from sinks import open_sink
from sinks.router.feed import RouterFeed
from tests.support.commands import Kvcache, RunPython, Start
from tests.support.feeds.keys import Keys
from tests.support.feeds.publisher import CLEARED, Publisher, batch, removed, replaying, stored
from tests.support.feeds.workers import CONTEXT, Worker, connecting, port_in_use
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.waiting import WAIT

H1, H2 = 0x1122334455667788, 0xF0E1D2C3B4A59687
TOKENS = (1 << 30) + 12345
"""A token id that would be recognized in any output."""


def secret(*hashes: int, **options: object) -> dict[str, object]:
    return {**stored(*hashes), "token_ids": [TOKENS] * (2 * len(hashes)), **options}


STORY = {
    0: batch(CLEARED),
    1: batch(secret(H1, H2, lora_name="chat bot"), secret(3, medium="CPU")),
    2: batch(),
    3: batch(secret(5, parent_block_hash=H2), removed(5), {"type": "Later\x1b[2J"}),
}
LINES = [
    "      0.0  AllBlocksCleared",
    "      1.0  BlockStored       GPU group=0 blocks=2 11223344..f0e1d2c3 tokens=4 lora='chat bot'",
    "      1.1  BlockStored       CPU group=0 blocks=1 00000000 tokens=2",
    "      3.0  BlockStored       GPU group=0 blocks=1 00000000 after f0e1d2c3 tokens=2",
    "      3.1  BlockRemoved      GPU group=0 blocks=1 00000000",
    "      3.2  Unknown           type='Later\\x1b[2J'",
]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as publisher:
        yield publisher


def ended(process: Forked) -> tuple[int, str, list[str]]:
    out, err = process.communicate(timeout=60)
    return process.wait(), out, err.splitlines()


class TestLines:
    """For people."""

    def test_live(self, start: Start, publisher: Publisher) -> None:
        """Each event is a line as it comes, without token ids; --count ends it; a summary is on stderr."""
        process = start("subscribe", publisher.endpoint, "--count", 3)
        publisher.wait_subscribed()
        for seq, payload in STORY.items():
            publisher.send(seq, payload)
        code, out, err = ended(process)
        assert (code, out.splitlines()) == (0, LINES)
        assert str(TOKENS) not in out
        assert err == [
            f"kvcache: subscribed to {publisher.endpoint}",
            "kvcache: 4 batches, 6 events; 2 blocks on GPU, 1 in host memory; 0 batches lost",
        ]

    def test_replay(self, kvcache: Kvcache, publisher: Publisher) -> None:
        """With --replay it begins with all that the publisher still knows, and says what was forgotten."""
        kept = {seq: STORY[seq] for seq in (1, 2, 3)}
        with replaying(kept) as server:
            done = kvcache("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 2)
        assert done.code == 0
        assert done.out.splitlines() == [
            "           missed 1 batch (0), lost: not received",
            *(f"{line} (replayed)" for line in LINES[1:]),
        ]
        assert done.err.splitlines()[1] == (
            "kvcache: 3 batches, 5 events; 2 blocks on GPU, 1 in host memory; 1 batch lost"
        )

    def test_gaps_and_restarts(self, start: Start, publisher: Publisher) -> None:
        """What was missed and recovered, and a publisher that begins anew, are lines of their own."""
        reported = batch(stored(1))
        with replaying({1: reported, 2: reported, 3: reported}) as server:
            process = start("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 5)
            publisher.wait_subscribed()
            assert server.asked.acquire(timeout=60)
            publisher.send(6, batch(stored(2), ts=9.0))
            assert server.asked.acquire(timeout=60)
            publisher.send(0, batch(CLEARED, ts=10.0))
            code, out, err = ended(process)
        assert code == 0
        assert [line.strip() for line in out.splitlines()] == [
            "missed 1 batch (0), lost: not received",
            *(
                f"{seq}.0  BlockStored       GPU group=0 blocks=1 00000000 tokens=2 (replayed)"
                for seq in (1, 2, 3)
            ),
            "missed 2 batches (4-5), lost: not received",
            "6.0  BlockStored       GPU group=0 blocks=1 00000000 tokens=2",
            "the publisher restarted: batch 0 came after 6",
            "0.0  AllBlocksCleared",
        ]
        assert err[-1].endswith("3 batches lost; 1 restart")

    def test_a_state_sent_again(self, start: Start, publisher: Publisher) -> None:
        """Numbers that a batch jumps over which clears everything are neither lost nor got by replay."""
        with replaying({}) as server:
            process = start("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 2)
            publisher.wait_subscribed()
            assert server.asked.acquire(timeout=60)
            publisher.send(4096, batch(CLEARED, ts=9.0))
            publisher.send(8192, batch(CLEARED, ts=10.0))
            code, out, err = ended(process)
        assert code == 0
        assert [line.strip() for line in out.splitlines()] == [
            "4096.0  AllBlocksCleared",
            "the publisher resends its whole state; its sequence numbers continue from 4096 to 8192",
            "8192.0  AllBlocksCleared",
        ]
        assert err[-1].endswith("1 resync; 0 batches lost")

    @pytest.mark.parametrize(("topic", "shown"), [("k", 2), ("other", 1)])
    def test_topic(self, start: Start, publisher: Publisher, topic: str, shown: int) -> None:
        """--topic chooses among replayed batches as it does among live ones."""
        with replaying({0: batch(CLEARED)}) as server:
            process = start(
                *("subscribe", publisher.endpoint, "--replay", server.endpoint),
                *("--topic", topic, "--count", shown, "-q"),
            )
            publisher.wait_subscribed()
            assert server.asked.acquire(timeout=60)
            publisher.send(1, batch(CLEARED, ts=9.0), topic=f"{topic}v".encode())
            code, out, _ = ended(process)
        assert code == 0
        assert ("(replayed)" in out) is (topic == "k")
        assert "      1.0  AllBlocksCleared\n" in out

    def test_silence_is_reported(
        self, kvcache: Kvcache, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of each endpoint at which nothing was heard for a while, once; not of one that has spoken."""
        monkeypatch.setattr("kvcache.cli.subscribe.sources.SILENCE_SECONDS", 0.5)
        with replaying({0: batch(CLEARED)}) as server, port_in_use() as port:
            there = f"{publisher.endpoint}?replay={server.endpoint.rpartition(':')[2]}"
            late = Timer(3.0, lambda: publisher.send(1, batch(CLEARED, ts=9.0)))
            late.start()
            done = kvcache("subscribe", there, f"tcp://127.0.0.1:{port}", "--count", 2)
            late.join()
        not_received = [line for line in done.err.splitlines() if "nothing received" in line]
        assert [line.partition(" yet: ")[0] for line in not_received] == [
            f"kvcache: nothing received from tcp://127.0.0.1:{port}"
        ]

    @pytest.mark.parametrize("port_alone", [True, False])
    def test_a_replay_by_its_port(self, kvcache: Kvcache, publisher: Publisher, *, port_alone: bool) -> None:
        """As in ENDPOINT?replay=PORT."""
        with replaying({0: batch(CLEARED)}) as server:
            port = server.endpoint.rpartition(":")[2]
            replay = ["--replay", port if port_alone else f"tcp://127.0.0.1:{port}"]
            done = kvcache("subscribe", publisher.endpoint, *replay, "--count", 1)
        assert done.out.endswith("AllBlocksCleared  (replayed)\n") or "(replayed)" in done.out

    def test_silent_replay(self, start: Start, publisher: Publisher) -> None:
        """A replay endpoint that does not answer is told of while it is waited for."""
        process = start("subscribe", publisher.endpoint, "--replay", "tcp://127.0.0.1:1")
        assert process.stderr is not None
        process.stderr.readline()
        assert process.stderr.readline() == (
            "kvcache: no answer yet from the replay endpoint tcp://127.0.0.1:1\n"
        )
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert (code, len(err)) == (128 + signal.SIGTERM, 1)

    def test_a_silent_replay_is_reported_of_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long it is waited for."""
        monkeypatch.setattr("kvcache.cli.subscribe.sources.SILENCE_SECONDS", math.inf)
        subscriptions, out = Mock(endpoints=["tcp://a:1"]), Mock()
        subscriptions.poll.return_value = []
        subscriptions.unanswered.side_effect = [("tcp://a:2", seconds) for seconds in (0, 1, 2, 3, 100)]
        subscriptions.unavailable.return_value = None
        subscriptions.counts.return_value = {"refused": 0}
        turns = receive(subscriptions, StopSignals(), Namespace(count=None), out)
        assert [next(turns) for _ in range(5)] == [None] * 5
        [[first], [second]] = [call.args for call in out.note.call_args_list]
        assert first == "subscribed to tcp://a:1"
        assert second == "no answer yet from the replay endpoint tcp://a:2"

    def test_quiet(self, kvcache: Kvcache, publisher: Publisher) -> None:
        """-q leaves the events only."""
        with replaying({0: batch(CLEARED)}) as server:
            done = kvcache("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 1, "-q")
        assert done == (0, "      0.0  AllBlocksCleared  (replayed)\n", "")


def test_json(kvcache: Kvcache, publisher: Publisher) -> None:
    """Programs get every field, tokens included, and hashes as hex digits, which no reader rounds."""
    later = secret(H1, parent_block_hash=-1, extra_keys=[["0x0102", 5]])
    story = {
        1: batch(later, ts=2.5, rank=3),
        2: batch({**removed(), "block_hashes": ["0x" + "00" * 8 + f"{H2:016x}"]}, ts=1e300),
    }
    with replaying(story) as server:
        done = kvcache(
            *("subscribe", publisher.endpoint, "--replay", server.endpoint, "--count", 2, "--json", "-q")
        )
    missed, store, removal = map(json.loads, done.out.splitlines())
    assert missed == {
        **dict.fromkeys(("seq", "index", "ts", "rank", "topic", "replayed")),
        "type": "Missed",
        "first_seq": 0,
        "last_seq": 0,
        "recovered": False,
        "reason": "not received",
    }
    assert {key: value for key, value in store.items() if value is not None} == {
        "seq": 1,
        "index": 0,
        "ts": 2_500_000_000,
        "rank": 3,
        "topic": "kv",
        "replayed": True,
        "type": "BlockStored",
        "block_hashes": [f"{H1:016x}"],
        "parent_block_hash": "f" * 16,
        "token_ids": [TOKENS] * 2,
        "block_size": 2,
        "medium": "GPU",
        "group_idx": 0,
        "extra_keys": [["0102", 5]],
    }
    assert (removal["type"], removal["block_hashes"]) == ("BlockRemoved", [f"{H2:016x}"])
    assert removal["ts"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_with_a_summary(start: Start, publisher: Publisher, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end it without a traceback, with the summary of what was heard."""
    process = start("subscribe", publisher.endpoint)
    publisher.wait_subscribed()
    publisher.send(0, STORY[1])
    assert process.stdout is not None
    assert process.stdout.readline().rstrip() == LINES[1].replace("1.0", "0.0")
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 128 + number
    assert err[1:] == ["kvcache: 1 batch, 2 events; 2 blocks on GPU, 1 in host memory; 0 batches lost"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: "),
        (["tcp://127.0.0.1:1", "--replay", "nonsense"], "nonsense: "),
        (["tcp://127.0.0.1:99999"], "tcp://127.0.0.1:99999: its port must be from 1 to 65535"),
        (["tcp://host"], "tcp://host: it has no port"),
        (["tcp://256.1.1.1:80"], "256.1.1.1 is not an IP address"),
        (["tcp://127.0.0.1:1", "--replay", "tcp://127.0.0.1:0"], "tcp://127.0.0.1:0: its port"),
        (["tcp://a..b:1"], "tcp://a..b:1: the host 'a..b' cannot be found: not a host name"),
        (["tcp://127.0.0.1:1", "--count", "0"], "'0' is not an integer that is at least 1"),
        ([], "the following arguments are required: ENDPOINT"),
    ],
)
def test_wrong_requests(kvcache: Kvcache, args: list[str], says: str) -> None:
    """An endpoint or a count that cannot be is one line, and exits with 2."""
    done = kvcache("subscribe", *args, "-q")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("kvcache: error: ")
    assert says in done.err


@pytest.mark.parametrize("option", [[], ["tcp://127.0.0.1:1", "--replay"]])
def test_a_host_that_nobody_knows(
    kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    """A misspelled name is told at once, and why it was not found, instead of listening to nobody."""
    asked = []

    def getaddrinfo(host: str, *_: object) -> list[object]:
        asked.append(host)
        if host == "nohost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert kvcache("subscribe", *option, "tcp://nohost:5557") == (
        2,
        "",
        "kvcache: error: tcp://nohost:5557: the host 'nohost' cannot be found: Name or service not known\n",
    )
    assert asked[-1] == "nohost"


def test_other_commands_do_not_load_zeromq(run_python: RunPython) -> None:
    """Declaring the command costs the others nothing."""
    done = run_python("import sys; from kvcache.cli.parser import build_parser\nprint('zmq' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


class TestManyPublishers:
    """Those that connect to where it is bound."""

    def test_lines_and_json_say_who(self, start: Start) -> None:
        """Each line names its worker, and the summary has one line for each."""
        for json_ in (False, True):
            port = free_port()
            options = ["--json"] if json_ else []
            process = start("subscribe", f"tcp://127.0.0.1:{port}", "--bind", *options)
            assert process.stdout is not None
            workers = [connecting(port, f"topic=kv@{pod}@unknown") for pod in "ab"]
            pods = set[str]()
            with workers[0], workers[1]:
                assert all(worker.feed.wait_subscribers(1, WAIT) for worker in workers)
                for handle, worker in enumerate(workers):
                    worker.put(worker.source.store(handle, 2))
                while pods != {"kv@a@unknown", "kv@b@unknown"}:
                    line = process.stdout.readline()
                    assert line
                    pods.add(json.loads(line)["topic"] if json_ else line.rstrip().rpartition("from=")[2])
                process.send_signal(signal.SIGINT)
                code, _, err = ended(process)
            assert code == 128 + signal.SIGINT
            assert sorted(line[: len("kvcache: kv@a@unknown: ")] for line in err[1:]) == [
                "kvcache: kv@a@unknown: ",
                "kvcache: kv@b@unknown: ",
            ]

    def test_keys(self, start: Start, tmp_path: Path) -> None:
        """Encrypted, from the files of an operator: to the feed that it connects to, or from those that connect."""
        keys = Keys(tmp_path)
        keys.make("feed", "reader", "stranger")
        keys.allow("reader")
        url = f"zmq+pub://127.0.0.1:0?curve_key={keys.secret('feed')}&curve_clients={keys.clients}"
        sink = open_sink(url, CONTEXT)
        assert isinstance(sink, RouterFeed)
        with Worker(feed=sink) as worker:
            worker.put(worker.source.store(1, 2))
            worker.settle()
            known = (
                "subscribe",
                worker.transport.endpoint,
                "--curve-server",
                keys.public("feed"),
                "--curve-key",
            )
            code, out, _ = ended(start(*known, keys.secret("reader"), "--count", 1))
            assert (code, "BlockStored" in out) == (0, True)
            refused = start(*known, keys.secret("stranger"))
            assert refused.stderr is not None
            refused.stderr.readline()
            assert "refused because its key is missing" in refused.stderr.readline()
            refused.send_signal(signal.SIGINT)
            assert ended(refused)[1] == ""

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["tcp://*:0"], "give keys"),
            (["tcp://*:0", "--insecure", "--replay", "tcp://127.0.0.1:1"], "use --replay topic"),
            (["tcp://127.0.0.1:1", "--insecure"], "--insecure is only valid with --bind"),
            (["tcp://127.0.0.1:1", "--curve-key", "K"], "needs both --curve-key and --curve-server"),
            (
                ["tcp://*:1", "--curve-server", "K"],
                "--curve-server is only valid for publishers to connect to: use --curve-clients",
            ),
            (["tcp://127.0.0.1:1", "--curve-key", "none", "--curve-server", "K"], "No such file"),
        ],
    )
    def test_what_is_refused(self, kvcache: Kvcache, arguments: list[str], reason: str) -> None:
        """Each refusal says what to write instead."""
        done = kvcache("subscribe", *arguments)
        assert (done.code, done.out) == (2, "")
        assert reason in done.err
