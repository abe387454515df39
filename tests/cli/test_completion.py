"""`kvcache completion`: scripts that know exactly what the parser knows."""

from __future__ import annotations

import argparse
import shutil
import subprocess

import pytest

from kvcache.cli.completion import _commands
from kvcache.cli.parser import COMMANDS, build_parser
from tests.cli.conftest import Kvcache

BASH = shutil.which("bash") or ""
ZSH = shutil.which("zsh") or ""


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kvcache", "re"], {"replay"}),
        (
            ["kvcache", ""],
            {"run", "replay", "events", "match", "subscribe", "config", "doctor", "completion"},
        ),
        (["kvcache", "--ver"], {"--version", "--verbose"}),
        (
            ["kvcache", "replay", "--"],
            {"--help", "--at", "--verify", "--json", "--verbose", "--quiet", "--log-json"},
        ),
        (["kvcache", "-q", "replay", "--v"], {"--verify", "--verbose"}),
        (["kvcache", "events", "log", "--type", "Transfer"], {"TransferLanded", "TransferFailed"}),
        (["kvcache", "completion", ""], {"bash", "zsh"}),
        (["kvcache", "run", "--log", ""], set()),
        (["kvcache", "run", ""], set()),
        (["kvcache", "run", "--limit", ""], set()),
        (["kvcache", "run", "--speed", ""], {"real", "max"}),
        (["kvcache", "run", "--sink", ""], {"file:", "stdout:", "zmq+pub:"}),
        (["kvcache", "run", "--sink", "f"], {"file:"}),
    ],
)
def test_bash_completes(kvcache: Kvcache, words: list[str], expected: set[str]) -> None:
    """Bash offers the commands, their options, and the values of an option; where a file fits, bash's own."""
    script = kvcache("completion", "bash").out
    array = " ".join(f"'{word}'" for word in words)
    call = f'{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _kvcache; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([BASH, "-c", call], capture_output=True, text=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(not BASH, reason="needs bash")
@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--limit", ["+o default"]),
        ("--hold", ["+o default"]),
        ("--speed", ["+o default"]),
        ("--sink", ["+o default", "-o nospace"]),
        ("--config", []),
        ("--log", []),
    ],
)
def test_bash_offers_files_only_where_they_fit(kvcache: Kvcache, option: str, changes: list[str]) -> None:
    """Bash's own completion, which is files, is turned off for values that are none; a URL goes on after its scheme."""
    script = kvcache("completion", "bash").out
    call = (
        f'compopt() {{ echo "$*"; }}\n{script}\nCOMP_WORDS=(kvcache run {option} ""); COMP_CWORD=3; _kvcache'
    )
    done = subprocess.run([BASH, "-c", call], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == changes


@pytest.mark.skipif(not BASH, reason="needs bash")
def test_old_bash_completes(kvcache: Kvcache) -> None:
    """Bash 3.2, which macOS has, cannot change its own completion; it offers the same, and complains about nothing."""
    script = kvcache("completion", "bash").out
    call = (
        f"enable -n compopt 2>/dev/null; shopt -s compat32 2>/dev/null\n{script}\n"
        'COMP_WORDS=(kvcache run --speed ""); COMP_CWORD=3; _kvcache; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run([BASH, "-c", call], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("real max\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_nothing_is_missing(kvcache: Kvcache, shell: str) -> None:
    """Both scripts have every command and every option of it."""
    script = kvcache("completion", shell).out
    commands = _commands(build_parser())
    assert [command.name for command in commands][:2] == ["", "run"]
    for command in commands[1:]:
        assert f"    {command.name})" in script
        for option in command.options:
            assert all(name in script for name in option.names)


def test_zsh_quotes(kvcache: Kvcache) -> None:
    """In the zsh script no text can end its quotes or brackets: both are balanced on every line."""
    for line in kvcache("completion", "zsh").out.splitlines():
        assert line.replace("'\\''", "").count("'") % 2 == 0
        assert line.count("[") == line.count("]")


@pytest.mark.skipif(not ZSH, reason="needs zsh")
def test_zsh_accepts(kvcache: Kvcache) -> None:
    """Zsh can read its script."""
    done = subprocess.run([ZSH, "-n"], input=kvcache("completion", "zsh").out, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
