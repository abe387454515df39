"""Pages of the reference that are made from docstrings are as the docstrings are.

`python -m tests.test_reference` writes them anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest

from events.errors import FieldsError
from tests.support.places import ROOT

RAISING = {
    "kvcache.errors": "Raised by the manager, the recorder and the prefix index.",
    "kvcache.replay": "Raised where a log is folded.",
    "kvcache.record.restart": "Raised by `KVCacheManager.open`.",
    "kvcache.device.secondary_file": "About the file of `secondary_path`.",
    "events.errors": "About files and logs.",
    "events.subscribe.endpoints": "About addresses of feeds.",
    "events.subscribe.sockets": "About keys of encrypted feeds.",
    "events.brokers.address": "About brokers.",
    "sinks.base": "About sinks.",
    "sinks.router.kv_events": "About vLLM's configuration of a feed.",
    "kvcache.maintenance.files": "About logs that are compressed, cut or copied.",
    "kvcache.publish.errors": "Raised by `kvcache publish`.",
    "kvcache.workload.traces": "About traces.",
    "kvcache.audit.kv_shape": "About a model's configuration.",
    "kvcache.audit.export": "Raised by `kvcache export`.",
    "kvcache.report.imported": "Raised by `kvcache report`.",
    "kvcache.audit.curve": "Raised by curves.",
    "kvcache.audit.advice": "Raised by `kvcache advise`.",
    "kvcache.whatif.commands": "Raised by `kvcache whatif`.",
    "kvcache.whatif.policies": "About policies of `kvcache whatif`.",
}
"""Modules with errors that callers may meet, and when."""


def errors() -> str:
    """Return the page of errors: all of each module, with fields and docstrings."""
    lines = [
        "# Errors",
        "",
        "Made from the docstrings by `python -m tests.test_reference`. Each error has the values that a program can",
        "act on as attributes, survives pickling, and its text says what to do; no text contains token ids.",
        "[api.md](api.md#errors) says which kinds there are.",
    ]
    for module, about in RAISING.items():
        lines += ["", f"## {module}", "", about, "", "| error | kind | when |", "|---|---|---|"]
        lines += (row(kind) for kind in declared(module))
    return "\n".join(lines) + "\n"


def declared(module: str) -> Iterator[type[FieldsError]]:
    """Yield the errors that a module defines, in order."""
    for kind in vars(import_module(module)).values():
        if isinstance(kind, type) and issubclass(kind, FieldsError) and kind.__module__ == module:
            yield kind


def row(kind: type[FieldsError]) -> str:
    """Return an error as a row of a table: its fields after its name, what it derives from, and its docstring."""
    fields = [] if kind.__init__ is Exception.__init__ else [*inspect.signature(kind).parameters]
    named = f"{kind.__name__}({', '.join(fields)})" if fields else kind.__name__
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return f"| `{named}` | {bases} | {re.sub('`+', '`', text).replace('|', chr(92) + '|')} |"


PAGES: dict[str, Callable[[], str]] = {"errors.md": errors}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_as_the_docstrings(name: str) -> None:
    """Nothing was changed by hand, and nothing without writing the page."""
    assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == PAGES[name]()


def test_every_error_has_its_fields_and_a_sentence() -> None:
    """No row is empty, and a field of each kind is there."""
    rows = [row(kind) for module in RAISING for kind in declared(module)]
    assert all(text.endswith(". |") for text in rows)
    assert any("`OutOfBlocks(index, " in text for text in rows)


if __name__ == "__main__":
    for name, made in PAGES.items():
        (ROOT / "docs" / "reference" / name).write_text(made(), encoding="utf-8")
