"""The small mistakes that `tests.mutants` makes are what they are called, and the same ones in changed code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.mutations import chosen, mutations
from tests.support.places import ROOT

FUNCTION = '''\
class Queue:
    def take(self, most: int = 3) -> int | None:
        """Take some."""
        assert most > 0
        while not self.closed and self.size >= most:
            self.size -= most * 2
            if most == 1:
                break
            print(f"{most + 1}")
        return self.size
'''


def body(line: str, kind: str) -> list[str]:
    """What becomes of a line of the function by mutations of a kind."""
    source = FUNCTION.encode()
    changed = [each.applied(source).decode() for each in mutations("q.py", source) if each.kind == kind]
    before = FUNCTION.splitlines()
    [at] = [number for number, text in enumerate(before) if text.strip() == line]
    return [text.splitlines()[at].strip() for text in changed if text.splitlines()[at] != before[at]]


@pytest.mark.parametrize(
    ("line", "kind", "after"),
    [
        ("while not self.closed and self.size >= most:", "and/or", "(not self.closed or self.size >= most)"),
        ("while not self.closed and self.size >= most:", "not", "(self.closed) and self.size >= most"),
        (
            "while not self.closed and self.size >= most:",
            "comparison",
            "not self.closed and (self.size > most)",
        ),
    ],
)
def test_a_condition_is_changed_in_one_place(line: str, kind: str, after: str) -> None:
    """Each kind has its part of the condition, and leaves the rest as it is."""
    assert body(line, kind) == [f"while {after}:"]


def test_each_kind_changes_what_it_is_called_for() -> None:
    """Statements go, operators and numbers change, loops end otherwise, and nothing is returned."""
    assert body("self.size -= most * 2", "deleted") == ["pass"]
    assert body("self.size -= most * 2", "operator") == ["self.size -= (most + 2)"]
    assert body("self.size -= most * 2", "constant") == ["self.size -= most * 3", "self.size -= most * 1"]
    assert body("break", "loop") == ["continue"]
    assert body("return self.size", "return") == ["return None"]


def test_what_no_test_could_notice_is_left_alone() -> None:
    """Assertions, documentation, parts of f-strings and defaults of parameters stay."""
    found = mutations("q.py", FUNCTION.encode())
    assert {each.lines[-1] for each in found} == {5, 6, 7, 8, 9, 10}
    assert [each.kind for each in found if 9 in each.lines] == ["deleted"]


def test_a_mutation_keeps_its_name_when_other_code_changes() -> None:
    """Names are those of the function, so code before it makes no difference, nor does the order of functions."""
    other = "def f() -> int:\n    return 1 + 1\n\n\n"
    names = [each.name for each in mutations("q.py", FUNCTION.encode())]
    longer = [each.name for each in mutations("q.py", (other + FUNCTION).encode())]
    assert longer[-len(names) :] == names
    assert len(set(longer)) == len(longer)


SMALL = ("events/feed", "sinks/router")


def test_what_is_chosen_is_spread_and_can_be_compiled() -> None:
    """As many in each area, of several kinds, others for another seed."""
    found = chosen(ROOT, 16, 7, SMALL)
    for area in SMALL:
        own = [each for each in found if each.file.startswith(area)]
        assert (len(own), len({each.kind for each in own})) == (8, 8)
    assert len(set(found) & set(chosen(ROOT, 16, 8, SMALL))) < 4
    for each in found:
        source = (ROOT / each.file).read_bytes()
        assert ast.dump(ast.parse(each.applied(source))) != ast.dump(ast.parse(source))


def test_a_change_elsewhere_leaves_the_choice_as_it_is(tmp_path: Path) -> None:
    """Other functions in a file take no more than a place or two of those that were chosen."""
    area = "events/feed"
    copied = tmp_path / area
    copied.mkdir(parents=True)
    for path in (ROOT / area).glob("*.py"):
        (copied / path.name).write_bytes(path.read_bytes())
    before = chosen(tmp_path, 8, 1, [area])
    changed = copied / "fold.py"
    changed.write_bytes(changed.read_bytes() + FUNCTION.encode())
    after = chosen(tmp_path, 8, 1, [area])
    assert len({each.name for each in before} - {each.name for each in after}) <= 2
