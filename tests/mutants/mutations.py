"""One-line changes of the product's code, and the choice of some of them.

A mutation is known by its file, function, kind and ordinal among those of that kind in the function, and chosen by a
hash of that and the seed. So a change of the code elsewhere leaves the choice as it is.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

AREAS = ("kvcache/fold", "kvcache/decide", "events/log", "events/feed", "sinks/router")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
DELETED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete)
UNTOUCHED = (ast.Assert, ast.JoinedStr, ast.arguments)
"""Assertions are for the type checker, Python 3.11 does not know where parts of an f-string are, and what parameters
are by default is no part of any function's run."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """A change of one expression or statement."""

    file: str
    """Relative to the tree."""
    function: str
    """With its class."""
    kind: str
    ordinal: int
    lines: tuple[int, ...]
    """What must run for it to matter: its own lines, and the first one of its statement."""
    place: tuple[int, int]
    """Bytes of the file, from and up to."""
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}:{self.kind}:{self.ordinal}"

    def applied(self, source: bytes) -> bytes:
        """Return the file's contents with the change."""
        begin, end = self.place
        return source[:begin] + self.after.encode() + source[end:]


def chosen(tree: Path, number: int, seed: int, areas: Sequence[str] = AREAS) -> list[Mutation]:
    """Return so many mutations of a tree, as many of each area, of kinds in turn."""
    found = []
    for index, area in enumerate(areas):
        by_kind = defaultdict(list)
        for path in sorted((tree / area).rglob("*.py")):
            for mutation in mutations(path.relative_to(tree).as_posix(), path.read_bytes()):
                by_kind[mutation.kind].append(mutation)
        ranked = [sorted(each, key=lambda mutation: _rank(seed, mutation.name)) for each in by_kind.values()]
        ranked.sort(key=lambda each: _rank(seed, area + each[0].kind))
        turns = [each[turn] for turn in range(max(map(len, ranked))) for each in ranked if turn < len(each)]
        found += turns[: number // len(areas) + (index < number % len(areas))]
    return found


def _rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def mutations(file: str, source: bytes) -> list[Mutation]:
    """Return all mutations of a file, in order."""
    return list(_Finder(file, source).mutations())


class _Finder:
    """Goes through the functions of a file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def mutations(self) -> Iterator[Mutation]:
        for name, function in _functions(ast.parse(self.source), ""):
            ordinals: defaultdict[str, int] = defaultdict(int)
            for statement, node in _inside(function):
                for kind, after in _changes(node):
                    begin, end = self._place(node)
                    own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    before = self.source[begin:end].decode()
                    if after != before:
                        lines = tuple(sorted({statement.lineno, *own}))
                        yield Mutation(
                            self.file, name, kind, ordinals[kind], lines, (begin, end), before, after
                        )
                        ordinals[kind] += 1

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )


def _functions(node: ast.AST, outer: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        name = f"{outer}.{child.name}".strip(".") if isinstance(child, Function | ast.ClassDef) else outer
        if isinstance(child, Function):
            yield name, child
        yield from _functions(child, name)


def _inside(function: Function) -> Iterator[tuple[ast.stmt, ast.expr | ast.stmt]]:
    """What a function consists of, each part with the statement that it belongs to; functions in it have their own."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    stack: list[tuple[ast.stmt, ast.AST]] = [(each, each) for each in reversed(body)]
    while stack:
        statement, node = stack.pop()
        if isinstance(node, (*UNTOUCHED, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.expr | ast.stmt):
            yield statement, node
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            parts.remove(node.annotation)
        stack += [(statement, part) for part in reversed(parts)]


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """What a node may become, by kind."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                others = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
                yield "comparison", _expression(ast.Compare(node.left, others, node.comparators))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", _expression(ast.BoolOp(other, node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield "not", _expression(node.operand)
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield "operator", _expression(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
        case ast.Constant(value=bool()):
            yield "flag", str(not node.value)
        case ast.Constant(value=int() as value):
            yield "constant", str(value + 1)
            yield "constant", f"({value - 1})" if value < 1 else str(value - 1)
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "return", "return None"
        case ast.Continue():
            yield "loop", "break"
        case ast.Break():
            yield "loop", "continue"
        case _ if isinstance(node, DELETED):
            yield "deleted", "pass"


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _expression(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
