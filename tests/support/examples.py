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


_RUN = re.compile(
    r"^```console\n(?P<console>.*?)^```\n|^```python\n(?P<program>.*?)^```\n(?P<between>\n```text\n)(?P<said>.*?)^```\n"
    r"|^```python\n(?P<alone>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"\$ kvcache (?P<args>.*?)(?: \| head -(?P<head>\d+))?")


def played(page: str) -> str:
    """Return a page with the output of its commands and programs, run in order in the current directory.

    Commands are those of `kvcache` in blocks of `console`, alone or cut by `| head -N`; the output of a command above a
    line ``...`` is left out. The output of a program in `python` is in a block of `text` right after it, if any.
    """

    def of_console(block: str) -> str:
        lines: list[str] = []
        for command, omitted in re.findall(r"^(\$ .*)\n(\.\.\.\n)?", block, re.MULTILINE):
            found = _COMMAND.fullmatch(command)
            assert found is not None, command
            said = _printed(partial(main, shlex.split(found["args"]))).splitlines()
            kept = ["..."] if omitted else said[: int(found["head"])] if found["head"] else said
            lines += [command, *(line.rstrip() for line in kept)]
        return "```console\n" + "\n".join(lines) + "\n```\n"

    def anew(found: re.Match[str]) -> str:
        if found["console"] is not None:
            return of_console(found["console"])
        code = found["alone"] or found["program"]
        said = _printed(lambda: exec(compile(code, "<page>", "exec"), {"__name__": "__main__"}))
        if found["alone"] is not None:
            return found[0]
        return f"```python\n{code}```\n{found['between']}{said}```\n"

    return _RUN.sub(anew, page)


def _printed(run: Callable[[], object]) -> str:
    with redirect_stdout(io.StringIO()) as said:
        run()
    return said.getvalue()
