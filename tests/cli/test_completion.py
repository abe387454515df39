"""`kvcache completion`: scripts that know exactly what the parser knows."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.cli.parser import COMMANDS, build_parser
from tests.support.commands import Kvcache

BASH = shutil.which("bash") or ""
ZSH = shutil.which("zsh") or ""
SHARED = {"--help", "--verbose", "--quiet", "--log-json"}


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("re", {"replay", "report"}),
        ("export log --to ", {"bailian", "csv", "jsonl", "mooncake", "parquet", "perfetto", "sqlite"}),
        ("export log --output a_", {"a_file", "a_directory"}),
        ("", set(COMMANDS)),
        ("--ver", {"--version", "--verbose"}),
        ("replay --", {"--at", "--time", "--verify", "--json"} | SHARED),
        ("-q replay --v", {"--verify", "--verbose"}),
        ("events log --type Transfer", {"TransferLanded", "TransferFailed"}),
        ("replay --time ", {"relative", "utc", "local"}),
        ("completion ", {"bash", "zsh", "fish", "tcsh"}),
        ("run --limit ", set()),
        ("run --speed ", {"real", "max"}),
        (
            "run --sink ",
            {"file:", "kafka:", "nats:", "otel:", "prometheus:", "redis:", "stdout:", "zmq+pub:"},
        ),
        ("run --sink f", {"file:"}),
        ("run ", {"a_file", "a_directory"}),
        ("run --config a_", {"a_file", "a_directory"}),
        ("run --log ", {"a_directory"}),
        ("replay a", {"a_directory"}),
        ("diff a_directory a", {"a_directory"}),
        ("match a_directory --tokens a_f", {"a_file"}),
    ],
)
def test_bash_completes(kvcache: Kvcache, tmp_path: Path, words: str, expected: set[str]) -> None:
    """Bash offers the commands, their options, the values of an option, and files where they fit."""
    (tmp_path / "a_file").touch()
    (tmp_path / "a_directory").mkdir()
    script = kvcache("completion", "bash").out
    array = " ".join(f"'{word}'" for word in ["kvcache", *words.split(" ")])
    call = f"COMP_WORDS=({array}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_kvcache"
    code = f'{script}\n{call}; printf "%s\\n" "${{COMPREPLY[@]}}"; complete -p kvcache >&2'
    done = subprocess.run([BASH, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.endswith("-F _shtab_kvcache kvcache\n")
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(not ZSH, reason="needs zsh")
def test_zsh_accepts(kvcache: Kvcache) -> None:
    """Zsh can read its script."""
    done = subprocess.run([ZSH, "-n"], input=kvcache("completion", "zsh").out, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_zsh_lists_schemes(kvcache: Kvcache) -> None:
    """In what an option takes, a bare colon would begin something else."""
    assert (
        r"(file\: kafka\: nats\: otel\: prometheus\: redis\: stdout\: zmq+pub\:)"
        in kvcache("completion", "zsh").out
    )


def test_without_shtab(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is said with what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = kvcache("completion", "bash")
    assert (done.code, done.out) == (2, "")
    assert done.err == "kvcache: error: completion needs shtab: pip install 'kvcache[cli]'\n"


def test_help_without_the_commands() -> None:
    """The list of commands is the same whether they are loaded or not, and one command alone parses as before."""
    assert build_parser([]).format_help() == build_parser().format_help()
    for command in COMMANDS:
        [alone, whole] = [
            {name: each.format_help() for name, each in _subparsers(parser).items()}
            for parser in (build_parser(["-v", command, "x"]), build_parser())
        ]
        assert alone[command] == whole[command]
        assert alone.keys() == whole.keys()


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(action.choices)
