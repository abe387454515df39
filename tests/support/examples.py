"""The programs in examples/ as modules, and the code on pages of the documentation."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from kvcache.cli import main
from tests.support.places import ROOT


def load(name: str) -> Any:
    """Import a program by its file's name."""
    spec = spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(name: str) -> str:
    """Return the text of a program in examples/ by its file's name."""
    return (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


def snippets(text: str, language: str) -> list[str]:
    """Return the blocks of code of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def snippet(text: str, language: str, containing: str) -> str:
    """Return the one block of code of a page in that language that contains something."""
    [found] = [code for code in snippets(text, language) if containing in code]
    return found


_LINES = r"((?:(?!```).*\n)*)"
_RUN = re.compile(rf"^```(console|python)\n{_LINES}```\n(\n```text\n{_LINES}```\n)?", re.MULTILINE)
_COMMAND = re.compile(r"\$ kvcache (?P<args>.*?)(?: \| head -(?P<head>\d+))?")


def played(page: str) -> str:
    """Return a page with the output of its commands and programs, run in order in the current directory.

    Commands are those of `kvcache` in blocks of `console`, alone or cut by `| head -N`; the output of a command above a
    line ``...`` is left out. The output of a program in `python` is in a block of `text` right after it, if any.
    """

    def anew(found: re.Match[str]) -> str:
        kind, code, output, _ = found.groups()
        if kind == "console":
            commands = re.findall(r"^(\$ .*)\n(\.\.\.\n)?", code, re.MULTILINE)
            return "```console\n" + "".join(_shown(*each) for each in commands) + "```\n" + (output or "")
        said = _printed(partial(exec, compile(code, "<page>", "exec"), {"__name__": "__main__"}))
        return f"```python\n{code}```\n" + (f"\n```text\n{said}```\n" if output else "")

    return _RUN.sub(anew, page)


def _shown(command: str, omitted: str) -> str:
    found = _COMMAND.fullmatch(command)
    assert found is not None, command
    said = _printed(partial(main, shlex.split(found["args"]))).splitlines()
    lines = said[: int(found["head"])] if found["head"] else said
    return f"{command}\n" + (omitted or "".join(f"{line.rstrip()}\n" for line in lines))


def _printed(run: Callable[[], object]) -> str:
    with redirect_stdout(io.StringIO()) as said:
        run()
    return said.getvalue()
