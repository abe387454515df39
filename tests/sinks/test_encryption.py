"""A feed that is encrypted: who is on the list gets everything, nobody else anything, and no secret is shown."""

from __future__ import annotations

import pickle
import socket
import sys
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from events.subscribe import sockets
from events.subscribe.endpoints import EndpointError
from events.subscribe.index import Index
from events.subscribe.sockets import (
    Curve,
    CurveUnavailable,
    KeyFileError,
    read_directory,
    read_pair,
    read_public,
    set_keepalive,
)
from events.subscribe.subscriber import Subscriber
from sinks import SinkURLError, open_sink
from sinks.router.feed import RouterFeed
from tests.support.feeds.keys import Keys
from tests.support.feeds.workers import CONTEXT, Router, Worker, resident
from tests.support.waiting import WAIT, wait_until

SMALL = "ring=1KiB&max_batch=2KiB&coalesce=0"
"""So that replays are compacted."""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(sockets, "LOOK_SECONDS", 0)
    keys = Keys(tmp_path)
    keys.make("feed", "friend", "stranger")
    keys.allow("friend")
    return keys


def encrypted(keys: Keys, options: str = SMALL) -> Worker:
    url = f"zmq+pub://127.0.0.1:0?replay=0&curve_key={keys.secret('feed')}&curve_clients={keys.clients}&{options}"
    sink = open_sink(url, CONTEXT)
    assert isinstance(sink, RouterFeed)
    return Worker(feed=sink)


def reading(worker: Worker, curve: Curve | None, *, replay: bool = True) -> Subscriber:
    endpoint = worker.transport.replay_endpoint if replay else None
    return Subscriber(worker.transport.endpoint, replay=endpoint, start=0 if replay else None, curve=curve)


def receive(subscriber: Subscriber, worker: Worker, index: Index | None = None) -> Index:
    """What is known when everything was heard."""
    index = Index() if index is None else index

    def done() -> bool:
        for report in subscriber.poll(10):
            index.fold(report)
        return index.resident() == resident(worker)

    wait_until(done)
    return index


class TestAccess:
    @pytest.mark.parametrize("replay", [False, True])
    def test_who_is_allowed_gets_everything(self, keys: Keys, replay: bool) -> None:
        """The state, live batches, and with a replay what was missed, from the ring and from the state."""
        with encrypted(keys) as worker, capture_logs() as logs:
            for handle in range(1, 60):
                worker.put(worker.source.store(handle, 3))
            worker.settle()
            with reading(worker, keys.calls("friend", "feed"), replay=replay) as subscriber:
                index = receive(subscriber, worker)
                assert len(index.resident()) == 59 * 3
                worker.put(worker.source.store(1000, 2), worker.source.remove(1))
                receive(subscriber, worker, index)
                assert (index.missed_batches, subscriber.refused) == (0, 0)
            server = worker.transport.replay
            assert server is not None
            assert bool(server.compacted) == replay
            assert worker.transport.refused == 0
        assert logs == []

    @pytest.mark.parametrize("who", ["nobody", "stranger", "wrong server"])
    def test_who_is_not_gets_nothing_and_both_ends_know(self, keys: Keys, who: str) -> None:
        """No message at all, live or replayed; the feed counts and complains, the reader counts, others are served."""
        curve = {
            "nobody": None,
            "stranger": keys.calls("stranger", "feed"),
            "wrong server": keys.calls("friend", "stranger"),
        }[who]
        with encrypted(keys) as worker, capture_logs() as logs:
            worker.put(worker.source.store(1, 3))
            worker.settle()
            with reading(worker, curve) as subscriber:
                reports = []

                server = worker.transport.replay
                assert server is not None

                def refused() -> bool:
                    # Of one attempt only one end may learn why, and it is tried again inside a call.
                    reports.extend(subscriber.poll(10))
                    return subscriber.refused > 0 and worker.transport.refused > server.refused > 0

                wait_until(refused)
                assert worker.feed.subscribers == 0
                with reading(worker, keys.calls("friend", "feed")) as friend:
                    receive(friend, worker)
                reports += subscriber.poll(50)
                assert (reports, subscriber.malformed) == ([], 0)
        refusals = [log for log in logs if log["event"] == "peer_refused"]
        endpoints = {worker.transport.endpoint, worker.transport.replay_endpoint}
        assert {log["endpoint"] for log in refusals} == endpoints
        refused_keys = [log["key"] for log in logs if log["event"] == "key_refused"]
        assert refused_keys == ([read_public(keys.public("stranger")).decode()] if who == "stranger" else [])
        assert len(refusals) + len(refused_keys) == len(logs)

    def test_the_address_of_who_has_no_key_is_reported(self, keys: Keys) -> None:
        """If it was there long enough to be asked for: of one that comes and goes at once ZeroMQ does not tell it."""
        with encrypted(keys) as worker, capture_logs() as logs:
            port = int(worker.transport.endpoint.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as peer:
                address = "{}:{}".format(*peer.getsockname())
                peers = worker.transport.publisher.peers
                wait_until(lambda: len(peers.connected) == 1)
                peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
                wait_until(lambda: bool(logs))
        assert [(log["event"], log["peer"]) for log in logs] == [("peer_refused", address)]

    def test_a_key_that_is_added_lets_in_without_a_restart(self, keys: Keys) -> None:
        """A reader that was turned away comes again by itself; one taken off the list is out when it comes next."""
        with encrypted(keys) as worker:
            worker.put(worker.source.store(1, 3))
            worker.settle()
            with reading(worker, keys.calls("stranger", "feed")) as subscriber:
                wait_until(lambda: not subscriber.poll(10) and subscriber.refused > 0)
                keys.allow("stranger")
                receive(subscriber, worker)
            (keys.clients / "stranger.key").unlink()
            with reading(worker, keys.calls("stranger", "feed")) as subscriber:
                wait_until(lambda: not subscriber.poll(10) and subscriber.refused > 0)

    def test_a_list_that_cannot_be_read_lets_nobody_in(self, keys: Keys) -> None:
        """Whoever cannot be read may have been taken off it."""
        with encrypted(keys) as worker, capture_logs() as logs:
            keys.clients.chmod(0o777)
            with reading(worker, keys.calls("friend", "feed")) as subscriber:
                wait_until(lambda: not subscriber.poll(10) and subscriber.refused > 0)
        assert "allow_list_unreadable" in {log["event"] for log in logs}

    def test_files_that_are_no_keys_keep_out_nobody_else(self, keys: Keys) -> None:
        """Each is named once, however often somebody comes; whose file is damaged is not let in, the others are."""
        with encrypted(keys) as worker:
            worker.put(worker.source.store(1, 3))
            worker.settle()
            keys.allow("stranger")
            (keys.clients / "a.key").write_text("damaged")
            (keys.clients / "b.key").symlink_to("nowhere")
            (keys.clients / "stranger.key").write_text('public-key = "cut off')
            with capture_logs() as logs:
                for _ in range(3):
                    with reading(worker, keys.calls("friend", "feed")) as subscriber:
                        receive(subscriber, worker)
                with reading(worker, keys.calls("stranger", "feed")) as subscriber:
                    wait_until(lambda: subscriber.refused > 0, meanwhile=lambda: subscriber.poll(10))
        named = [log["reason"].partition(":")[0] for log in logs if log["event"] == "allow_list_unreadable"]
        assert named == [str(keys.clients / name) for name in ("a.key", "b.key", "stranger.key")]

    def test_plain_sockets_of_another_program_read_it(self, keys: Keys) -> None:
        """Pyzmq's own CURVE client, as a router would have it, with an identity as long as one may be."""
        friend = read_pair(keys.secret("friend"))
        with encrypted(keys, "coalesce=0") as worker, Router() as router:
            worker.settle()
            for kind in (zmq.SUB, zmq.DEALER):
                socket = router.socket(kind)
                socket.curve_publickey, socket.curve_secretkey = friend.public, friend.secret
                socket.curve_serverkey = read_public(keys.public("feed"))
                socket.identity = b"x" * 255
            live, dealer = router.sockets
            live.subscribe(b"")
            live.connect(worker.transport.endpoint)
            assert live.poll(int(WAIT * 1000))
            dealer.connect(str(worker.transport.replay_endpoint))
            dealer.send_multipart([b"", bytes(8)])
            assert dealer.poll(int(WAIT * 1000))

    def test_nobody_gets_in_where_no_gate_stands(self, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
        """Should the list not be asked, for whatever reason, the answer is no."""
        received: list[object] = []
        came: set[float] = set()
        monkeypatch.setattr(sockets.Gate, "open", lambda gate: None)
        monkeypatch.setattr("sinks.router.zmq.HANDSHAKE_SECONDS", 0.1)
        with encrypted(keys) as worker:
            worker.put(worker.source.store(1, 1))
            with reading(worker, keys.calls("friend", "feed"), replay=False) as subscriber:
                peers = worker.transport.publisher.peers

                def receive_more() -> None:
                    received.extend(subscriber.poll(10))
                    came.update(peers.connected.values())

                wait_until(lambda: len(came) > 2, meanwhile=receive_more)  # it is hung up on, and comes again
            assert worker.feed.subscribers == 0
        assert received == []


class TestURL:
    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("zmq+pub://*:5557", r"tcp://\*:5557, .*curve_key= and curve_clients= .*insecure=1"),
            ("zmq+pub://127.0.0.1:5557?replay=*:5558", r"unencrypted to tcp://\*:5558"),
            ("zmq+pub://router:5557?topic=a", r"curve_key= and curve_server= .*insecure=1"),
            ("zmq+pub://router:5557?replay=*:1", r"curve_key= and curve_clients= and curve_server="),
            ("zmq+pub://router:5557?replay=1", r"give its address, as in replay=\*:5558"),
            ("zmq+pub://router:5557?insecure=1", r"add topic= or replay=; .*connect=0"),
            ("zmq+pub://router:0?topic=a", "router's host and port"),
            ("zmq+pub://*:5557?connect=1&topic=a", "router's host and port"),
            ("zmq+pub://127.0.0.1:1?ring=1KiB", "requires replay="),
            (
                "zmq+pub://127.0.0.1:1?curve_key=K",
                "a feed that binds is encrypted with curve_key, curve_clients",
            ),
            ("zmq+pub://127.0.0.1:1?curve_clients=K&curve_key=K&curve_server=K", "a feed that binds"),
            (
                "zmq+pub://r:1?topic=a&curve_clients=K&curve_key=K&curve_server=K",
                "that connects is encrypted",
            ),
            ("zmq+pub://r:1?topic=a&curve_key=K&curve_server=K&insecure=1", "insecure= has no effect"),
            ("zmq+pub://127.0.0.1:1?curve_key=none&curve_clients=.", "No such file"),
        ],
    )
    def test_what_is_refused(
        self, url: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each error says what to write instead."""
        (tmp_path / "a.key").write_text('public-key = "' + "0" * 40 + '"')
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SinkURLError, match=reason):
            open_sink(url, CONTEXT)

    @pytest.mark.parametrize(
        ("url", "endpoint", "connects", "replay"),
        [
            ("127.0.0.1:7", "127.0.0.1:7", False, None),
            ("localhost:7", "127.0.0.1:7", False, None),
            ("localhost:7?connect=1&topic=a", "127.0.0.1:7", True, None),
            ("[::1]:7", "::1:7", False, None),
            ("[::]:7?insecure=1", ":::7", False, None),
            ("*:7?insecure=1&replay=8&rank=2", "*:7", False, "*:8"),
            ("127.0.0.1:7?replay=8&rank=2", "127.0.0.1:7", False, "127.0.0.1:8"),
            ("router:7?insecure=1&topic=a", "router:7", True, None),
            ("10.0.0.5:7?insecure=1&topic=a", "10.0.0.5:7", True, None),
            ("10.0.0.5:7?insecure=1&connect=0", "10.0.0.5:7", False, None),
            ("router:7?insecure=1&replay=*:8&rank=1", "router:7", True, "*:8"),
            ("router:7?insecure=1&replay=[::]:8", "router:7", True, ":::8"),
        ],
    )
    def test_who_binds_and_where(self, url: str, endpoint: str, connects: bool, replay: str | None) -> None:
        """Wildcards and loopback are bound, all else is connected to."""
        sink = open_sink(f"zmq+pub://{url}", CONTEXT)
        assert isinstance(sink, RouterFeed)
        settings = sink.transport.settings  # type: ignore[attr-defined]
        place, answers = settings.place, settings.replay
        assert (f"{place.host}:{place.port}", place.connects) == (endpoint, connects)
        assert replay == (None if answers is None else f"{answers.host}:{answers.port}")

    def test_keepalive_is_set_on_every_socket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """TCP looks after a minute of silence, on the feed's socket and the replay's."""
        found: list[tuple[object, object]] = []

        def note(socket: zmq.Socket[bytes]) -> None:
            set_keepalive(socket)
            found.append((socket.get(zmq.TCP_KEEPALIVE), socket.get(zmq.TCP_KEEPALIVE_IDLE)))

        monkeypatch.setattr("sinks.router.zmq.set_keepalive", note)
        sink = open_sink("zmq+pub://127.0.0.1:0?replay=0", CONTEXT)
        assert isinstance(sink, RouterFeed)
        with Worker(feed=sink):
            assert found == [(1, 60)] * 2


class TestKeyFiles:
    def test_no_secret_is_shown(self, keys: Keys) -> None:
        """Not in texts of keys, settings or sinks."""
        secret = read_pair(keys.secret("feed")).secret.decode()
        curve = keys.serves("feed")
        with encrypted(keys) as worker:
            reported = [repr(curve), str(curve), repr(worker.transport.settings), repr(worker.runner.stats())]
        assert curve.own.secret.decode() == secret
        assert not [text for text in reported if secret in text]

    @pytest.mark.parametrize("mode", [0o604, 0o620, 0o666, 0o644])
    def test_a_secret_that_others_may_read_is_refused(self, keys: Keys, mode: int) -> None:
        """It says what to do; a group may read it, as Kubernetes has it."""
        keys.secret("feed").chmod(mode)
        with pytest.raises(KeyFileError, match="chmod 600"):
            read_pair(keys.secret("feed"))
        for right in (0o600, 0o400, 0o440):
            keys.secret("feed").chmod(right)
            read_pair(keys.secret("feed"))

    def test_a_list_that_others_may_write_is_refused(self, keys: Keys) -> None:
        """They could let themselves in: by the directory, or by a file in it."""
        for path, mode in ((keys.clients, 0o777), (keys.clients / "friend.key", 0o664)):
            before = path.stat().st_mode
            path.chmod(mode)
            with pytest.raises(KeyFileError, match="chmod go-w"):
                read_directory(keys.clients)
            path.chmod(before & 0o777)
        read_directory(keys.clients)

    @pytest.mark.parametrize(
        "content",
        ["", "hidden", "public-key", 'public-key = "hidden"', 'public-key = "' + "~" * 40 + '"', "\0\xff"],
    )
    def test_what_is_no_key_file_is_refused_and_not_repeated(self, tmp_path: Path, content: str) -> None:
        """The error names the file, is typed, and survives pickling."""
        path = tmp_path / "a.key"
        path.write_text(content)
        with pytest.raises(KeyFileError) as caught:
            read_public(path)
        assert "hidden" not in str(caught.value)
        assert str(path) in str(pickle.loads(pickle.dumps(caught.value)))

    def test_pairs_must_be_pairs(self, keys: Keys, tmp_path: Path) -> None:
        """A public file has no secret, and a secret of another public key is no pair; a directory is no file."""
        with pytest.raises(KeyFileError, match="no secret key: give the file NAME"):
            read_pair(keys.public("feed"))
        mixed = keys.secret("feed").read_text()
        other = read_pair(keys.secret("stranger"))
        keys.secret("feed").write_text(
            mixed.replace(read_pair(keys.secret("feed")).public.decode(), other.public.decode())
        )
        with pytest.raises(KeyFileError, match="does not match its secret key"):
            read_pair(keys.secret("feed"))
        with pytest.raises(KeyFileError, match="Is a directory"):
            read_public(tmp_path)
        (empty := tmp_path / "empty").mkdir()
        with pytest.raises(KeyFileError, match="no client could connect"):
            read_directory(empty)

    def test_a_reader_that_encrypts_names_the_publishers_key(self, keys: Keys) -> None:
        """Without it nothing could be encrypted."""
        with pytest.raises(EndpointError, match="publisher's public key"):
            Subscriber("tcp://127.0.0.1:5557", curve=Curve.read(keys.secret("friend")))

    def test_a_library_without_encryption_is_reported(
        self, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a typed error, of the library and of a URL."""
        monkeypatch.setattr(sys.modules["zmq"], "has", lambda capability: False)
        with pytest.raises(CurveUnavailable, match="no CURVE encryption"):
            keys.calls("friend", "feed")
        with pytest.raises(SinkURLError, match="no CURVE encryption"):
            encrypted(keys)
