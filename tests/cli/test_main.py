"""What all commands have in common: exit codes, error lines, pipes, and what they do not load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from events.diagnostics import get_logger
from kvcache import __version__
from kvcache.cli import messages
from kvcache.replay import replay
from tests.support.commands import TRACE, Kvcache, Start, python, segments
from tests.support.places import ROOT

READERS = {
    "replay": ["replay", "LOG", "--verify"],
    "events": ["events", "LOG"],
    "match": ["match", "LOG", "--request", "3"],
    "export": ["export", "LOG", "--to", "csv", "-o", "OUT"],
    "diff": ["diff", "LOG", "LOG"],
    "audit": ["audit", "LOG"],
    "explain": ["explain", "LOG", "--request", "3"],
    "curve": ["curve", "LOG"],
    "whatif": ["whatif", "LOG", "--no-bound"],
    "config": ["config", "--set", "max_sequence_length=64", "--set", "primary_blocks=4"],
    "completion": ["completion", "bash"],
    "run": ["run", str(TRACE), "--no-pools", "--limit", "2"],
}


class TestErrors:
    """One line on stderr, and a code that says whose fault it is."""

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            ([], "the following arguments are required: COMMAND"),
            (["frobnicate"], "invalid choice: 'frobnicate'"),
            (["audti"], "invalid choice: 'audti'; did you mean audit? (choose from"),
            (["events", "x", "--type", "blockstored"], "did you mean BlocksStored? (choose from"),
            (["run", "--bogus"], "unrecognized arguments: --bogus (see `kvcache run --help`)"),
            (["--bogus", "run"], "unrecognized arguments: --bogus (see `kvcache --help`)"),
            (["replay"], "the following arguments are required: LOG"),
            (["replay", "/nowhere/log"], "/nowhere/log is not a log directory"),
            (["events", "/nowhere/log"], "/nowhere/log is not a log directory"),
            (["match", "/nowhere/log", "--request", "1"], "/nowhere/log is not a log directory"),
            (
                ["export", "/nowhere/log", "--to", "csv", "-o", "/nowhere/t"],
                "/nowhere/log is not a log directory",
            ),
            (["replay", "x", "--at", "-1"], "'-1' is not a moment of a log"),
            (["replay", "x", "--at", "1.5s"], "'1.5s' is not a moment of a log"),
            (["run", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl: No such file or directory"),
            (["config", "--config", "/nowhere/c.toml"], "/nowhere/c.toml: cannot be read"),
            (["config", "--set", "head_dim"], "write FIELD=VALUE"),
            (["completion", "sh"], "invalid choice: 'sh'"),
        ],
    )
    def test_wrong_requests_exit_with_2(self, kvcache: Kvcache, args: list[str], says: str) -> None:
        """Wrong usage and missing files are one line that says what is wrong, and exit with 2."""
        done = kvcache(*args)
        assert done.code == 2
        assert done.out == ""
        assert done.err.startswith("kvcache: error: ")
        assert says in done.err
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(
        "args",
        [
            ["audit", "LOG", "--top", "1" + "0" * 5000],
            ["diff", "LOG", "LOG", "--top", "1" + "0" * 30],
            ["whatif", "LOG", "--jobs", "x" * 5000],
            ["curve", "LOG", "--sample", "9" * 5000],
            ["run", "--seed", "9" * 5000],
            ["events", "LOG", "--until", "z" * 5000],
            ["explain", "LOG", "--request", "z" * 5000],
            ["audit", "LOG", "--bogus" * 1000],
        ],
        ids=lambda args: args[0],
    )
    def test_huge_arguments_are_not_repeated(self, kvcache: Kvcache, log: Path, args: list[str]) -> None:
        """What is wrong is said with the beginning of the argument alone."""
        done = kvcache(*(str(log) if arg == "LOG" else arg for arg in args))
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("kvcache: error: ")
        assert len(done.err) < 400

    def test_each_problem_of_the_settings_has_its_line(self, kvcache: Kvcache) -> None:
        """Several wrong settings are several lines, each complete."""
        done = kvcache("config", "--set", "head_dim=x", "--set", "dtype=int3")
        lines = done.err.splitlines()
        assert done.code == 2
        assert [line.split(":")[2].strip() for line in lines] == ["head_dim", "dtype"]

    def test_verbose_shows_where_an_error_comes_from(self, kvcache: Kvcache) -> None:
        """Without -v there is no traceback, with it there is, before the same line; it may stand on either side."""
        assert "Traceback" not in kvcache("replay", "/nowhere").err
        for args in (["-v", "replay", "/nowhere"], ["replay", "/nowhere", "-v"]):
            done = kvcache(*args)
            assert done.code == 2
            assert "Traceback" in done.err
            assert done.err.splitlines()[-1].startswith("kvcache: error: /nowhere")

    def test_error_lines_cannot_drive_a_terminal(self, kvcache: Kvcache) -> None:
        """Control characters in a name are spelled out."""
        done = kvcache("replay", "/no\x1b[2Jwhere\n")
        assert "\x1b" not in done.err
        assert "\\x1b[2Jwhere\\n" in done.err
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(
        "args", [["replay", "x", "--no\x1b[2Jsuch\n"], ["events", "x", "--follow=\x1b[2J"]]
    )
    def test_usage_lines_cannot_drive_a_terminal(self, kvcache: Kvcache, args: list[str]) -> None:
        """Nor can arguments that are refused."""
        done = kvcache(*args)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "\x1b" not in done.err

    def test_memory_is_an_error(self, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
        """What does not fit into memory is one line."""

        def fail(*_: object) -> None:
            raise MemoryError("8 GiB")

        monkeypatch.setattr("kvcache.cli.config.run", fail)
        done = kvcache("config")
        assert (done.code, done.err) == (2, "kvcache: error: out of memory: 8 GiB\n")

    @pytest.mark.parametrize("args", ["--help", "--version", "completion bash"])
    def test_output_that_cannot_be_written(self, args: str, tmp_path: Path) -> None:
        """It is reported once, as a line, also that of --help."""
        done = in_shell(f"{args} >{tmp_path / 'out'}", first=NO_FILES)
        assert (done.returncode, done.stderr) == (2, "kvcache: error: File too large\n")

    @pytest.mark.parametrize("args", ["replay /nowhere", "frobnicate"])
    def test_error_that_cannot_be_said(self, args: str, tmp_path: Path) -> None:
        """If stderr cannot be written, the exit code says the same as with one that can."""
        assert in_shell(f"{args} 2>{tmp_path / 'err'}", first=NO_FILES).returncode == 2
        assert (tmp_path / "err").read_bytes() == b""


class TestClosedStreams:
    """Commands whose caller has closed a standard stream."""

    def test_no_output(self, log: Path) -> None:
        """Without a stdout a command does its work and shows nothing."""
        done = in_shell(f"replay {log} >&-")
        assert (done.returncode, done.stderr) == (0, "")

    def test_no_input(self, log: Path) -> None:
        """A closed stdin is an empty one."""
        done = in_shell(f"match {log} --tokens - <&-")
        assert (done.returncode, done.stderr) == (2, "kvcache: error: stdin contains no token ids\n")

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        """A run without any of them writes its log, and no message into it."""
        done = in_shell(f"run --no-pools --limit 2 --log {tmp_path / 'log'} <&- >&- 2>&-")
        assert done.returncode == 0
        assert replay(tmp_path / "log", verify=True).batches > 2


NO_FILES = "ulimit -f 0; "
"""Every byte that is written to a file fails, on any system; /dev/full would be Linux's."""


def in_shell(args: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command by a shell, which can do to its streams what Python cannot."""
    script = f"{first}{sys.executable} -m kvcache {args}"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)


def test_version(kvcache: Kvcache) -> None:
    """--version names the command and its version."""
    assert kvcache("--version") == (0, f"kvcache {__version__}\n", "")


@pytest.mark.parametrize(
    "command", ["run", "replay", "events", "match", "export", "config", "doctor", "completion"]
)
def test_every_command_has_help(kvcache: Kvcache, command: str) -> None:
    """Each command explains itself, and is listed with a line in the general help."""
    assert f"usage: kvcache {command}" in kvcache(command, "--help").out
    assert f"\n    {command} " in kvcache("--help").out


def test_each_action_on_a_log_has_a_paragraph(kvcache: Kvcache) -> None:
    """However wide the terminal is, the help of `log` begins a line with each of them."""
    reported = kvcache("log", "--help").out
    for action in ("info", "verify", "repair", "salvage", "compact", "compress", "prune"):
        assert f"\n\n{action}: " in reported


def test_module_can_be_run(start: Start) -> None:
    """`python -m kvcache` is the command where no script is installed."""
    process = start("--version")
    assert process.communicate() == (f"kvcache {__version__}\n", "")


def test_closed_reader_ends_the_command_silently(log: Path) -> None:
    """In `kvcache events | head` nothing complains when head has seen enough."""
    script = f"{sys.executable} -m kvcache events --json {log}; echo code $? >&2"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith('{"seq":0,')
        process.stdout.close()
        assert process.stderr.read() == "code 141\n"


HEAVY = ("torch", "cuda_ops.torch_copier", "transformers")
ONE_AFTER_THE_OTHER = """
import json, sys
from kvcache.cli import main
found = {}
for command, args in json.loads(sys.argv[1]).items():
    before = set(sys.modules)
    found[command] = main(args), sorted(set(sys.modules) - before)
print()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded(log: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """Exit code of each command, and the modules that it loads; all of them run in one process, one by one."""
    commands = {
        command: [str(log) if arg == "LOG" else arg for arg in args] for command, args in READERS.items()
    }
    done = python(tmp_path_factory.mktemp("loaded"), ONE_AFTER_THE_OTHER, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", READERS)
def test_torch_is_not_loaded(loaded: dict[str, tuple[int, list[str]]], command: str) -> None:
    """Commands that read, and runs without pools, work without torch and do not ask for it."""
    code, modules = loaded[command]
    assert (code, [name for name in HEAVY if name in modules]) == (0, [])


def test_modules_that_commands_load_are_seen(loaded: dict[str, tuple[int, list[str]]]) -> None:
    """The first command that reads a log has loaded what reads logs, and no later one does so again."""
    assert [command for command, (_, modules) in loaded.items() if "events.log" in modules] == ["replay"]


class TestDiagnostics:
    """What the libraries report on stderr."""

    @pytest.fixture
    def broken(self, tmp_path: Path) -> tuple[object, ...]:
        """A run with a sink that can be opened and then takes nothing: the reader of its pipe goes at once."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        # Opening waits for the run to open the other end.
        threading.Thread(target=lambda: os.close(os.open(pipe, os.O_RDONLY)), daemon=True).start()
        return "run", TRACE, "--no-pools", "--limit", 3, "--tokens-per-block", 16, "--sink", f"file:{pipe}"

    def test_json_lines(self, kvcache: Kvcache, broken: tuple[object, ...]) -> None:
        """With --log-json a sink that fails is reported as a JSON line without any local variables."""
        err = kvcache(*broken, "--log-json").err
        assert '"event": "sink_lost_batches"' in err
        assert '"level": "warning"' in err
        assert "locals" not in err

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["replay", "/nowhere\x1b"], "/nowhere\\x1b is not a log directory"),
            (["replay", "x", "--bogus"], "unrecognized arguments: --bogus"),
        ],
    )
    def test_errors_as_json(self, kvcache: Kvcache, args: list[str], says: str) -> None:
        """With --log-json, given anywhere, an error is a JSON line, that of wrong usage included."""
        for line in (["--log-json", *args], [*args, "--log-json"]):
            done = kvcache(*line)
            [reported] = map(json.loads, done.err.splitlines())
            assert (done.code, reported["level"]) == (2, "error")
            assert says in reported["event"]
            assert reported["timestamp"].endswith("Z")
            assert "exception" not in reported
        assert kvcache(*args).err.startswith("kvcache: error: ")

    def test_traceback_as_json(self, kvcache: Kvcache) -> None:
        """With -v the JSON line of an error holds its traceback."""
        [reported] = map(json.loads, kvcache("replay", "/nowhere", "--log-json", "-v").err.splitlines())
        assert reported["exception"].startswith("Traceback")

    def test_notes_as_json(self, kvcache: Kvcache, log: Path, tmp_path: Path) -> None:
        """Notes are JSON lines, too, and -q silences them in either form."""
        torn = shutil.copytree(log, tmp_path / "torn")
        last = segments(torn)[-1]
        last.write_bytes(last.read_bytes()[:-3])
        args = ("events", torn, "--log-json")
        [reported] = map(json.loads, kvcache(*args).err.splitlines())
        assert (reported["event"].partition(":")[0], reported["level"]) == ("the log is torn", "info")
        assert kvcache(*args, "-q").err == ""

    def test_warnings_are_reported(self, kvcache: Kvcache, broken: tuple[object, ...]) -> None:
        """Without being asked, stderr has the warnings of the library in the command's own form."""
        _, out, err = kvcache(*broken)
        [reported] = [line for line in err.splitlines() if "sink_lost_batches" in line]
        assert reported.startswith("kvcache: warning: sink_lost_batches (sink=file://")
        assert "dropped=" in reported
        assert "Broken pipe" in out

    def test_quiet(self, kvcache: Kvcache, broken: tuple[object, ...]) -> None:
        """With -q there are no warnings, but errors; the summary tells about the sink."""
        _, out, err = kvcache(*broken, "-q")
        assert "warning" not in err
        assert "Broken pipe" in out

    def test_reasons(self, kvcache: Kvcache) -> None:
        """What a warning is about comes first, then its reason, then all else."""
        url = "zmq+pub://0.0.0.0:0?pad=true&replay=0&state=&insecure=1"
        args = ("run", TRACE, "--no-pools", "--limit", 2, "--sink", url)
        [reported] = kvcache(*args).err.splitlines()
        assert reported.startswith("kvcache: warning: feed_leaves_machine")
        assert "endpoint=tcp://0.0.0.0:" in reported
        assert kvcache(*args, "-q").err == ""

    @pytest.mark.parametrize(
        ("options", "levels"),
        [
            ({"verbose": True}, ["note", "warning", "error"]),
            ({}, ["warning", "error"]),
            ({"quiet": True}, ["error"]),
            ({"quiet": True, "verbose": True}, ["note", "warning", "error"]),
        ],
    )
    def test_levels(
        self, options: dict[str, bool], levels: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """-q leaves errors, -v adds notes, and no report shows what an exception says."""
        messages.configure_diagnostics(as_json=False, **({"verbose": False, "quiet": False} | options))
        log = get_logger("test")
        log.info("note", reason="a\nb", count=1)
        log.warning("warning", path="/x")
        try:
            raise ValueError("se-cret")
        except ValueError:
            log.exception("error")
        lines = {
            "note": "kvcache: note: a\\nb (count=1)",
            "warning": "kvcache: warning: warning (path=/x)",
            "error": "kvcache: error: error (exception=ValueError)",
        }
        assert capsys.readouterr().err.splitlines() == [lines[level] for level in levels]


def test_terminal_without_unicode(log: Path) -> None:
    """Dashes and bars have a plain form of the same width where a terminal cannot encode them."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvcache", "match", str(log), "--request", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "\\u" not in done.stdout
    assert "480-495 " in done.stdout
