"""Cheap signs of a private vocabulary in the product: words that mean several things, and elliptical docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.support.places import ROOT
from tests.support.sources import PACKAGES, files, parsed

PRIVATE = re.compile(
    r"told|tells?|teller|telling|hears?|heard|hearing|whose|behind|besides?|newcomers?|anew", re.IGNORECASE
)
"""They say neither return, emit, publish, receive, log nor report, and neither after, below, child nor next to."""
WORD_IN_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
ELLIPTICAL = re.compile(r"(?:Of|What|Who|Whoever|Whose|Whether|How)\s")
"""Beginnings of docstrings that name nothing, so that they mean little in a tooltip."""
MAY_SAY = {
    ("kvcache/tap/lines.py", "tell"): "the position in a file has this name in Python",
}
MAY_BEGIN_SO = {
    "kvcache/config.py": "settings of models and engines are described by whether and how they do something",
}


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield lines and names with one of these words, between underscores or capitals."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and any(map(PRIVATE.fullmatch, WORD_IN_NAME.findall(token.string))):
            yield token.start[0], token.string


def elliptical(source: str) -> Iterator[tuple[int, str]]:
    """Yield lines and docstrings, of attributes as well, that begin with a relative clause or with "Of"."""
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for line, text in texts(node.body):
            if ELLIPTICAL.match(text):
                yield line, text.partition("\n")[0]


def texts(statements: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield lines and values of statements that are only a text."""
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement.lineno, str(statement.value.value)


def product() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each module of the product."""
    for package in PACKAGES:
        for file in files(package):
            yield file.relative_to(ROOT).as_posix(), file.read_text()


def test_names_are_of_the_field() -> None:
    """No identifier of the product says told, heard, behind or beside."""
    found = [
        f"{path}:{line}: {name}"
        for path, source in product()
        for line, name in private_names(source)
        if (path, name) not in MAY_SAY
    ]
    assert found == []


def test_docstrings_begin_with_what_they_describe() -> None:
    """Nouns for things and imperatives for functions: a tooltip shows no sentence around them."""
    found = [
        f"{path}:{line}: {text}"
        for path, source in product()
        if path not in MAY_BEGIN_SO
        for line, text in elliptical(source)
    ]
    assert found == []


def test_exceptions_are_needed() -> None:
    """Nothing is excused that is not there any more."""
    sources = dict(product())
    assert [
        key for key in MAY_SAY if key[1] not in {name for _, name in private_names(sources[key[0]])}
    ] == []
    assert [path for path in MAY_BEGIN_SO if not any(elliptical(sources[path]))] == []


def test_signs_are_found() -> None:
    """In names of all kinds, and in docstrings of modules, classes, attributes and functions."""
    source = (
        '"""What it is."""\nclass ToldState:\n    """Of it."""\n    last_heard = 1\n    """Whether so."""\n'
        'def tell_of(fold, behind):\n    """How so."""\n    heartbeat = f"{fold} told behind"\n'
        'async def foretell() -> None:\n    """Return it. What it is is not said."""\n'
    )
    assert list(private_names(source)) == [(2, "ToldState"), (4, "last_heard"), (6, "tell_of"), (6, "behind")]
    assert [line for line, _ in elliptical(source)] == [1, 3, 5, 7]
