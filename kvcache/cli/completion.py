"""``kvcache completion``: a script that lets a shell complete commands and options.

It is made from the parser itself, so it knows every option, and only those. The metavar of an option says what its
values are: FILE and DIR files, URL a sink's scheme, words in lower case themselves (``real|N|max``), all others
nothing that could be offered.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from kvcache.cli.output import Output
from sinks import known_schemes

_NOTHING, _FILES = "NOTHING", "FILE"


class Option(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    is_path: bool
    repeated: bool


class Command(NamedTuple):
    """A command with what can follow it."""

    name: str
    help: str
    options: tuple[Option, ...]
    choices: tuple[str, ...]
    """What its argument can be; empty: a file, or nothing."""


def add_parser(commands: Any, **options: Any) -> None:
    """Declare the command; `options` are those that all commands share."""
    parser = commands.add_parser(
        "completion",
        **options,
        description="Print a completion script.",
        epilog=(
            'bash: eval "$(kvcache completion bash)" in ~/.bashrc\n'
            'zsh:  eval "$(kvcache completion zsh)" in ~/.zshrc, after compinit'
        ),
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="which shell")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the script."""
    from kvcache.cli.parser import build_parser  # the parser declares this command

    out.line(_SCRIPTS[args.shell](_commands(build_parser())))
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[Command]:
    """What the parser declares; argparse offers no public way to ask."""
    [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    commands = [_command("", "", parser)]
    return commands + [_command(name, helps[name], each) for name, each in subparsers.choices.items()]


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    options = tuple(_option(action) for action in parser._actions if action.option_strings)
    positional = [
        action
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
    ]
    return Command(name, text, options, tuple(map(str, positional[0].choices or ())) if positional else ())


def _option(action: argparse.Action) -> Option:
    return Option(
        names=tuple(action.option_strings),
        help=(action.help or "").split(";")[0],
        takes_value=action.nargs != 0,
        choices=_choices(action),
        is_path=action.metavar in ("FILE", "DIR"),
        repeated=isinstance(action, argparse._AppendAction),
    )


def _choices(action: argparse.Action) -> tuple[str, ...]:
    if action.choices:
        return tuple(map(str, action.choices))
    if action.metavar == "URL":
        return tuple(f"{scheme}:" for scheme in known_schemes())
    alternatives = str(action.metavar or "").split("|")
    return tuple(word for word in alternatives if word.islower()) if len(alternatives) > 1 else ()


# --- bash


def _bash(commands: list[Command]) -> str:
    root, *rest = commands
    cases = "\n".join(_bash_case(command) for command in rest)
    names = " ".join(command.name for command in rest)
    return f"""\
_kvcache() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in -*) ;; *) command="$word"; break ;; esac
  done
  local options="{_names(root)}" values="" words="{names}"
  case "$command" in
{cases}
    *) ;;
  esac
  if [ "$values" = {_FILES} ]; then
    return
  elif [ -n "$values" ]; then
    compopt +o default 2>/dev/null
    case "$values" in *:*) compopt -o nospace 2>/dev/null ;; esac
    [ "$values" = {_NOTHING} ] || COMPREPLY=( $(compgen -W "$values" -- "$current") )
  else
    case "$current" in
      -*) COMPREPLY=( $(compgen -W "$options" -- "$current") ) ;;
      *) COMPREPLY=( $(compgen -W "$words" -- "$current") ) ;;
    esac
  fi
}}
complete -o default -F _kvcache kvcache"""


def _bash_case(command: Command) -> str:
    values = [
        f'        {"|".join(option.names)}) values="{_bash_values(option)}" ;;'
        for option in command.options
        if option.takes_value
    ]
    inner = "\n".join(values)
    body = f'      options="{_names(command)}"; words="{" ".join(command.choices)}"'
    if inner:
        body += f'\n      case "$previous" in\n{inner}\n      esac'
    return f"    {command.name})\n{body} ;;"


def _bash_values(option: Option) -> str:
    return " ".join(option.choices) or (_FILES if option.is_path else _NOTHING)


def _names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


# --- zsh


def _zsh(commands: list[Command]) -> str:
    root, *rest = commands
    names = " ".join(_quoted(f"{command.name}:{command.help}") for command in rest)
    cases = "\n".join(f"    {command.name})\n      _arguments {_zsh_specs(command)} ;;" for command in rest)
    return f"""\
#compdef kvcache
_kvcache() {{
  local line state
  local -a commands
  commands=({names})
  _arguments -C {_zsh_specs(root)} '1:command:->command' '*::argument:->argument'
  case "$state" in
    command) _describe command commands ;;
    argument)
      case "$line[1]" in
{cases}
      esac ;;
  esac
}}
compdef _kvcache kvcache"""


def _zsh_specs(command: Command) -> str:
    specs = [_zsh_spec(option, name) for option in command.options for name in option.names]
    if command.choices:
        specs.append(_quoted(f"1:argument:({' '.join(command.choices)})"))
    elif command.name:
        specs.append(_quoted("*:file:_files"))
    return " ".join(specs)


def _zsh_spec(option: Option, name: str) -> str:
    text = option.help.replace("[", "(").replace("]", ")").replace(":", " -")
    spec = f"{'*' if option.repeated else ''}{name}[{text}]"
    if option.takes_value:
        listed = " ".join(option.choices).replace(":", "\\:")
        values = f"({listed})" if listed else "_files" if option.is_path else " "
        spec += f":value:{values}"
    return _quoted(spec)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh}
