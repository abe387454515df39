"""``kvcache completion``: a script for shell completion of commands, options and their values.

shtab generates it from the parser itself, so it has exactly its options. The metavar of an argument determines its
values: FILE, TRACE, DIR, LOG, LOG_A and LOG_B files, URL a sink's scheme, words in lower case themselves
(``real|N|max``), all others none.
"""

from __future__ import annotations

import argparse

from kvcache.cli.output import Output
from kvcache.errors import UsageError
from sinks import known_schemes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Print a completion script."
    parser.epilog = (
        'bash: eval "$(kvcache completion bash)" in ~/.bashrc\n\n'
        'zsh: eval "$(kvcache completion zsh)" in ~/.zshrc, after compinit\n\n'
        "fish: kvcache completion fish | source, in ~/.config/fish/config.fish\n\n"
        "tcsh: kvcache completion tcsh > ~/.kvcache.tcsh, and in ~/.tcshrc: source ~/.kvcache.tcsh"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="shell to complete for")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the script."""
    from kvcache.cli.parser import build_parser  # the parser itself declares this command

    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion needs shtab: pip install 'kvcache[cli]'") from error
    parser = build_parser()
    colon = r"\:" if args.shell == "zsh" else ":"  # a bare one would end the list there
    paths = dict.fromkeys(("FILE", "TRACE", "PATH"), shtab.FILE)
    paths |= dict.fromkeys(("DIR", "LOG", "LOG_A", "LOG_B"), shtab.DIRECTORY)
    # argparse has no public way to list all options of commands.
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in [action for command in commands.choices.values() for action in command._actions]:
        if action.metavar in paths:
            action.complete = paths[action.metavar]
        elif action.metavar == "URL":
            action.choices = [scheme + colon for scheme in known_schemes()]
        elif action.choices is None:
            action.choices = [word for word in str(action.metavar).split("|") if word.islower()] or None
    out.line(shtab.complete(parser, args.shell))
    return 0
