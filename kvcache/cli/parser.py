"""Argument parser of all commands."""

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
    "run": "play a trace or generated chats through a cache, and verify its log",
    "replay": "show the cache's state at any point of a log",
    "events": "print the events of a log, all or filtered",
    "diff": "compare two logs: the first difference, and reuse by request",
    "match": "look up a prompt in the cache: what it would reuse, block by block",
    "who": "show which requests hold a slot, and which held it before",
    "explain": "explain what a request reused, and why it computed the rest",
    "audit": "summarize why prompt tokens were computed, over all requests",
    "top": "watch a running cache by the log that it writes",
    "advise": "recommend cache sizes, timeouts and pins, from a log or a trace",
    "curve": "show reuse as a function of cache size",
    "export": "export a log as tables (Parquet, CSV, JSON lines, SQLite) or as a trace",
    "whatif": "replay the requests of a log under other settings and eviction policies",
    "report": "write an HTML report about a log",
    "publish": "publish the events of a log that another process writes",
    "log": "inspect, verify, repair, prune or compress the files of a log",
    "tap": "record the KV events that running engines publish",
    "subscribe": "print live KV events, or a table of workers",
    "config": "show the settings an engine would get here, or their JSON schema",
    "doctor": "check this machine and its packages",
    "docs": "print a page of the documentation",
    "completion": "print a shell completion script",
}
"""Commands by module name, with their summaries."""


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
        """Reject unknown arguments here: the outer parser, which would do so otherwise, refers to the wrong help."""
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
    """Return the parser of the whole command line, or, since loading all commands is slow, of the command in `argv`."""
    wanted = None if argv is None else next((arg for arg in argv if not arg.startswith("-")), "")
    parser = Parser(
        prog="kvcache",
        description="Run an event-sourced KV cache, record other engines' caches, and analyse the logs.",
        epilog="With a log: `kvcache audit LOG`. With a trace: `kvcache advise TRACE`. With neither: `kvcache run`, "
        "which plays generated chats for about 20 seconds. `kvcache docs tour` shows it all once.",
    )
    parser.add_argument("--version", action="version", version=f"kvcache {__version__}")
    _add_common(parser, default=False)
    common = Parser(add_help=False)
    # Accepted before and after the command; the default after it must not override a value given before it.
    _add_common(common, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    # Help that is not of a command lists all of them.
    only = [wanted] if argv and argv[0] == wanted and wanted in COMMANDS else COMMANDS
    for name in only:
        command = commands.add_parser(name, parents=[common], help=COMMANDS[name])
        if wanted in (None, name):
            module = import_module(f"kvcache.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: Any) -> None:
    group = parser.add_argument_group("messages")
    for names, purpose in (
        (("-v", "--verbose"), "print more notes, and the traceback of an error"),
        (("-q", "--quiet"), "print only results and errors: no progress, notes or warnings"),
        (("--log-json",), "print errors, warnings, notes and diagnostics as JSON lines on stderr"),
    ):
        group.add_argument(*names, action="store_true", default=default, help=purpose)
