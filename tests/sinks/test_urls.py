"""Sink URLs: parsing, options, and finding the sink for a scheme."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import msgspec
import pytest

from events.brokers.address import BrokerURLError, parse
from sinks import SinkContext, SinkError, SinkOpenError, SinkURL, SinkURLError, known_schemes, open_sink
from sinks.file import FileSink
from sinks.stdout import StdoutSink

CONTEXT = SinkContext(key_bytes=32, tokens_per_block=16)


class Options(msgspec.Struct):
    tokens: bool = False
    replay: int = 0


class TestParse:
    def test_takes_a_url_apart(self) -> None:
        """Scheme, address, path and options are found, percent signs decoded."""
        url = SinkURL.parse("zmq+pub://127.0.0.1:5557/a%20b?format=vllm&replay=5558")
        assert (url.scheme, url.host, url.port, url.path) == ("zmq+pub", "127.0.0.1", 5557, "/a b")
        assert dict(url.options) == {"format": "vllm", "replay": "5558"}

    def test_keeps_credentials_out_of_texts(self) -> None:
        """User and password are attributes and appear in no text of the URL or an error about it."""
        url = SinkURL.parse("nats://me:s%40cret@host:4222/x?token=t0ken")
        assert (url.user, url.password) == ("me", "s@cret")
        assert str(url) == "nats://host:4222/x"
        with pytest.raises(SinkURLError) as caught:
            open_sink("nats://me:hidden@host:4222/x?token=t0ken", CONTEXT)
        assert "hidden" not in str(caught.value)
        assert "t0ken" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("file://me:hidden@localhost/tmp/e.jsonl", "this sink has no authentication"),
            ("file://hidden@localhost/tmp/e.jsonl", "this sink has no authentication"),
            ("stdout://me:hidden@", "this sink has no authentication"),
            ("stdout://:hidden@", "this sink has no authentication"),
            ("zmq+pub://me:hidden@127.0.0.1:5557", "this sink has no authentication"),
            ("file:me:hidden@host/e.jsonl", "follow //"),
            ("stdout:me:hidden@", "follow //"),
            ("zmq+pub:me:hidden@127.0.0.1:5557", "follow //"),
        ],
    )
    def test_a_login_is_refused_and_not_repeated(self, url: str, why: str) -> None:
        """A sink that asks for none says so, also where the slashes were forgotten."""
        with pytest.raises(SinkURLError, match=why) as caught:
            open_sink(url, CONTEXT)
        parsed = SinkURL.parse(url)
        assert "hidden" not in f"{caught.value} {caught.value.args} {parsed} {parsed!r}"

    @pytest.mark.parametrize(
        "url",
        [
            "nats://kv:7/hidden@127.0.0.1:4222/kvcache",
            "nats://kv:hid@den/hidden@127.0.0.1:4222/kvcache",
            "nats://kv:x/hidden@127.0.0.1:4222/kvcache",
            "nats:///kv:hidden@h/k",
            "nats:/kv:hidden@h/k",
            "redis://:/hidden@h/s",
            "kafka://u:7/hidden@h/t",
            "zmq+pub://a:7/hidden@127.0.0.1:4222",
            "prometheus://a:7/hidden@127.0.0.1:9",
            "file://a:7/hidden@x/e",
            "stdout://a:7/hidden@x",
            "natsx://u:7/hidden@h/t",
            "redis://127.0.0.1/s?password_filehidden=1",
            "redis://127.0.0.1/s?hidden!=1",
        ],
    )
    def test_a_password_that_is_not_where_it_belongs_is_not_repeated(self, url: str) -> None:
        """A slash in it that is not written as %2F makes it a part of the path, or of an option's name."""
        with pytest.raises(SinkError) as caught:
            open_sink(url, CONTEXT)
        assert "hid" not in str(caught.value).replace("password_file", "")

    @pytest.mark.parametrize(
        "url", ["nats://kv:7/hidden@h/s", "redis://:/hidden@h/s", "kafka://h/s?a_hidden_A=1"]
    )
    def test_readers_do_not_repeat_it_either(self, url: str) -> None:
        """The address of a broker to read from."""
        with pytest.raises(BrokerURLError) as caught:
            parse(url)
        assert "hidden" not in str(caught.value)

    @pytest.mark.parametrize("path", ["/", ".", "//"])
    @pytest.mark.parametrize("url", ["zmq+pub://127.0.0.1:5557", "nats:", "redis:"])
    def test_state_must_be_a_file(self, url: str, path: str) -> None:
        """A path that names none is refused when the sink is made."""
        with pytest.raises(SinkError, match="state= must be the name of a file"):
            open_sink(f"{url}?state={path}", CONTEXT)

    @pytest.mark.parametrize(
        "url",
        [
            "zmq+pub://127.0.0.1:5557?coalesce=",
            "zmq+pub://127.0.0.1:5557?replay=5558&ring=",
            "zmq+pub://127.0.0.1:5557?salts=",
            "zmq+pub://127.0.0.1:5557?hwm=",
            "nats:?timeout=",
            "nats:?format=",
            "file:e.jsonl?max_bytes=",
            "stdout:?format=",
            "file:e.jsonl?",
        ],
    )
    def test_long_values_are_not_repeated_whole(self, url: str) -> None:
        """Nor are long names of options."""
        with pytest.raises(SinkURLError) as caught:
            open_sink(url + "x" * 5000 + ("=1" if url.endswith("?") else ""), CONTEXT)
        assert len(str(caught.value)) < 1000

    def test_a_path_may_look_like_a_login(self) -> None:
        """Behind ./ a colon and an @ are letters of a file's name."""
        assert isinstance(open_sink("file:./a:b@c.jsonl", CONTEXT), FileSink)

    @pytest.mark.parametrize(
        "url", ["", "events.jsonl", "x://host:port/", "file:///a?b", "file:///a?x=1&x=2", "s://[/"]
    )
    def test_refuses_what_is_no_url(self, url: str) -> None:
        """Anything that cannot be understood whole is refused, as a ValueError."""
        with pytest.raises(SinkURLError):
            SinkURL.parse(url)
        assert issubclass(SinkURLError, ValueError)

    def test_a_bad_port_does_not_leak_the_password(self) -> None:
        """The error about a URL that cannot be parsed repeats nothing of it but the scheme."""
        with pytest.raises(SinkURLError) as caught:
            SinkURL.parse("nats://me:hidden@host:port")
        assert "hidden" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "named"),
        [
            ("zmq+pub://127.0.0.1:99999", "zmq+pub://127.0.0.1:99999"),
            ("x://me:hidden@host:65536/hidden?a=hidden", "x://host:65536"),
            ("x://[::1]:-1", "x://[::1]"),
            ("x://me:hidden", "x://me"),
            ("x://me:12345678", "x://me"),
        ],
    )
    def test_a_bad_port_is_named(self, url: str, named: str) -> None:
        """A port that there is not is said to be that, with the URL as far as it can hold no secret."""
        with pytest.raises(SinkURLError) as caught:
            SinkURL.parse(url)
        assert str(caught.value) == f"sink {named!r}: its port must be from 0 to 65535"

    def test_a_trailing_separator_is_no_option(self) -> None:
        """Options may end with a separator, as programs write them; an empty one between others is refused."""
        assert dict(SinkURL.parse("x:?a=1&").options) == {"a": "1"}
        assert dict(SinkURL.parse("x:?&").options) == {}
        with pytest.raises(SinkURLError):
            SinkURL.parse("x:?a=1&&b=2")

    def test_errors_quote_the_url(self) -> None:
        """Where a URL ends and the sentence goes on can be seen, also behind a colon."""
        with pytest.raises(SinkURLError, match=r"^sink 'foo:': unknown scheme 'foo'"):
            open_sink("foo:", CONTEXT)

    def test_a_fragment_is_refused(self) -> None:
        """A # in a path is an error, as everything behind it would be ignored."""
        for url in ("file:///tmp/run#3.jsonl", "file:///tmp/run#"):
            with pytest.raises(SinkURLError, match="%23"):
                SinkURL.parse(url)

    @pytest.mark.parametrize("letter", "\t\r\n")
    def test_letters_that_urllib_leaves_out_are_refused(self, letter: str) -> None:
        """A line break in a path would name another file; percent signs say that it is meant."""
        with pytest.raises(SinkURLError, match="%0A"):
            SinkURL.parse(f"file:///tmp/ru{letter}n.jsonl")
        assert SinkURL.parse("file:///tmp/ru%0An").path == "/tmp/ru\nn"


class TestOptions:
    def test_are_typed(self) -> None:
        """Values become what the sink declared; what is not given has its default."""
        assert SinkURL.parse("x:?tokens=1").read_options(Options) == Options(tokens=True)
        assert SinkURL.parse("x:?tokens=false&replay=5").read_options(Options) == Options(replay=5)

    def test_unknown_ones_are_refused_with_the_known_named(self) -> None:
        """A misspelled option does not go unnoticed."""
        with pytest.raises(SinkURLError, match=r"unknown option 'token'; known options: tokens, replay"):
            SinkURL.parse("x:?token=1").read_options(Options)

    def test_bad_values_are_refused(self) -> None:
        """A value of another type names the option and the known ones."""
        with pytest.raises(SinkURLError, match=r"int.*\$\.replay.*known options: tokens, replay"):
            SinkURL.parse("x:?replay=many").read_options(Options)

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("stdout:?format=xml", r"\$\.format`; format must be one of text, jsonl, trtllm; known options"),
            (
                "zmq+pub://127.0.0.1:5557?salts=foo",
                r"\$\.salts`; salts must be one of digest, plain; known options",
            ),
        ],
    )
    def test_choices_are_named(self, url: str, says: str) -> None:
        """Where only a few words are accepted, these are named."""
        with pytest.raises(SinkURLError, match=says):
            open_sink(url, SinkContext(32, 4))


class TestErrors:
    @pytest.mark.parametrize(
        "error", [SinkURLError("x:", "bad"), SinkOpenError("x", "bad"), SinkError("bad")]
    )
    def test_survive_pickling(self, error: SinkError) -> None:
        """Every error of the package comes out of a pickle with the same type, text and fields."""
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


class TestRegistry:
    def test_built_in_sinks_need_no_installation(self) -> None:
        """The schemes stdout and file are found by their scheme."""
        assert isinstance(open_sink("stdout:", CONTEXT), StdoutSink)
        assert isinstance(open_sink("file:///tmp/x.jsonl", CONTEXT), FileSink)

    def test_unknown_scheme_lists_the_known(self) -> None:
        """The error for a scheme nobody provides names those that somebody does."""
        with pytest.raises(SinkURLError, match=r"unknown scheme 'fiel'; known schemes: .*file.*stdout"):
            open_sink("fiel:///tmp/x", CONTEXT)

    @pytest.fixture
    def plugin(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A distribution on the path, as pip lays it down, that provides sinks."""
        info = tmp_path / "plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[kvcache.sinks]\nours = plugin_sink:make\nasking = plugin_sink:ask\n"
            "file = plugin_sink:steal\nneedy = missing_module:make\n"
        )
        (tmp_path / "plugin_sink.py").write_text(
            "def make(url, context):\n    return [url.host, context.key_bytes]\n"
            "def ask(url, context):\n    return [url.user, url.password]\nask.takes_login = True\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "plugin_sink", raising=False)
        return "ours"

    def test_entry_points_add_schemes(self, plugin: str) -> None:
        """A sink of another package is found by its entry point and gets the URL and the context."""
        assert plugin in known_schemes()
        made: object = open_sink("ours://somewhere", CONTEXT)
        assert made == ["somewhere", 32]

    def test_a_login_that_a_sink_does_not_take_is_refused(self, plugin: str) -> None:
        """Unless the sink, of another package, says that it takes one."""
        for login in ("me:hidden@", "hidden@", ":hidden@"):
            with pytest.raises(SinkURLError, match="has no authentication") as caught:
                open_sink(f"{plugin}://{login}somewhere", CONTEXT)
            assert "hidden" not in str(caught.value)
            made: object = open_sink(f"asking://{login}somewhere", CONTEXT)
            assert made in (["me", "hidden"], ["hidden", None], [None, "hidden"])

    @pytest.mark.usefixtures("plugin")
    def test_entry_points_cannot_replace_built_in_sinks(self) -> None:
        """A package that claims the scheme file does not get the events meant for files."""
        assert isinstance(open_sink("file:///tmp/x.jsonl", CONTEXT), FileSink)

    @pytest.mark.usefixtures("plugin")
    def test_a_broken_entry_point_says_what_provides_it(self) -> None:
        """A plugin whose requirement is missing is reported by name."""
        with pytest.raises(SinkURLError, match=r"provided by missing_module:make, which cannot be imported"):
            open_sink("needy:", CONTEXT)
