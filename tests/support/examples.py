"""The programs in examples/ as modules, and the code on pages of the documentation."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

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
