"""Arguments of all commands, with their types."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvcache._version import __version__
from kvcache.cli import messages

COMMANDS = {
    "run": "play a trace, or generated chats, and verify the log",
    "replay": "the state that a log records, at any point",
    "events": "the events of a log, all or a choice",
    "diff": "where two logs first differ, and how their reuse does",
    "match": "what a prompt would reuse, block by block",
    "who": "who holds a slot, and who held it",
    "explain": "why a request reused what it did, and computed the rest",
    "audit": "why prompt tokens were computed, over all requests",
    "top": "what a cache does now, from the log that it is writing",
    "advise": "what to do about a cache, from its log or from a trace",
    "curve": "what a log's prompts would reuse in a smaller or larger cache",
    "export": "a log as tables: Parquet, CSV, JSON lines, SQLite",
    "whatif": "the requests of a log under other settings and orders of eviction",
    "report": "a page for a browser about what the cache of a log did",
    "publish": "sinks for a log that another process writes",
    "log": "a log's files: what there is, whether it is whole, how much is kept",
    "tap": "record what running engines tell of their caches",
    "subscribe": "listen to a live stream of KV events",
    "config": "the settings that an engine gets here, or their schema",
    "doctor": "what this machine offers, and what is missing",
    "docs": "the pages of the documentation",
    "completion": "a completion script for bash, zsh, fish or tcsh",
}
"""Commands by module name, with their purpose."""


_LONG = re.compile(r"\S{81,}")
"""Arguments too long to be quoted in a message."""


def _cut(word: re.Match[str]) -> str:
    return f"{word[0][:40]}…{word[0][-10:]}"


class _Paragraphs(argparse.HelpFormatter):
    """Formatter that fills descriptions paragraph by paragraph, independent of their line breaks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = (super(_Paragraphs, self)._fill_text(each, width, indent) for each in text.split("\n\n"))
        return "\n\n".join(filled) + "\n" * text.endswith("\n")


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors that refer to the help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Paragraphs, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as the base class does, and suggest a similar name."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            from difflib import get_close_matches

            known = {str(choice).lower(): str(choice) for choice in action.choices or ()}
            near = get_close_matches(str(value).lower(), known, n=1)
            if near:
                said, choose, choices = error.message.partition(" (choose from")
                error.message = f"{said}; did you mean {known[near[0]]}?{choose}{choices}"
            raise

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Reject unknown arguments here: the base class leaves that to the outer parser, which names the wrong help."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        messages.error(f"{_LONG.sub(_cut, message)} (see `{self.prog} --help`)")
        self.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print as the base class does, but raise if output cannot be written."""
        print(message, end="", file=file or sys.stderr)


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, or only what `argv` needs: loading all commands takes long."""
    wanted = None if argv is None else next((arg for arg in argv if not arg.startswith("-")), "")
    parser = Parser(
        prog="kvcache",
        description="An event-sourced KV cache: play requests through it, and read the log that it leaves.",
        epilog="`kvcache run` without anything plays generated chats as fast as it can: about 20 seconds.",
    )
    parser.add_argument("--version", action="version", version=f"kvcache {__version__}")
    _add_common(parser, default=False)
    common = Parser(add_help=False)
    # Given before the command or after it; a default after it must not override a value before it.
    _add_common(common, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, parents=[common], help=purpose)
        if wanted in (None, name):
            module = import_module(f"kvcache.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: Any) -> None:
    group = parser.add_argument_group("messages")
    for names, purpose in (
        (("-v", "--verbose"), "more notes, and tracebacks of errors"),
        (("-q", "--quiet"), "no progress, notes and warnings: only the result, and errors"),
        (("--log-json",), "errors, warnings, notes and diagnostics as JSON lines on stderr"),
    ):
        group.add_argument(*names, action="store_true", default=default, help=purpose)
