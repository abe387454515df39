"""That there is a test for each scenario, named after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conformance.scenarios import ABSENT, SCENARIOS
from tests.support.places import ROOT

BYTES = ROOT / "tests" / "tensors" / "test_conformance_bytes.py"
"""Those that look at tensors."""
NAMED = re.compile(r"test_([a-z])_([0-9]+)_")


def covered() -> set[str]:
    """The ids in the names of the tests beside this one, and of those with tensors."""
    names = [
        node.name
        for file in [*Path(__file__).parent.glob("test_*.py"), BYTES]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    return {f"{found[1].upper()}-{found[2]}" for found in map(NAMED.match, names) if found}


def test_each_scenario_has_a_test_or_a_reason() -> None:
    """No scenario is missing, none is tested that is said to be absent, and no test has an id that does not exist."""
    assert ABSENT.keys() <= SCENARIOS.keys()
    assert sorted(covered()) == sorted(SCENARIOS.keys() - ABSENT.keys())
