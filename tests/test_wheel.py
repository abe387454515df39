"""The wheel: what is in it, and that it names nothing that is not."""

from __future__ import annotations

import re
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.support.places import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel of this tree."""
    [built] = WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]
    )
    return ZipFile(built)


def test_packages_and_pages_are_in_it(wheel: ZipFile) -> None:
    """The four packages with their data, and all documentation, as `kvcache docs` looks for it."""
    names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "kvcache",
        "events",
        "sinks",
        "cuda_ops",
    }
    assert {f"kvcache/{page.relative_to(ROOT)}" for page in (ROOT / "docs").rglob("*.md")} <= names
    assert {
        f"kvcache/report/{name}"
        for name in ("page.css", "page.html", "page.js", "pieces.html", "sections.html")
    } <= names
    assert "kvcache/py.typed" in names


def test_the_description_names_no_file_that_is_not_in_it(wheel: ZipFile) -> None:
    """Relative links of the README are text, and pages are named by the command that shows them."""
    [metadata] = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    description = Parser().parsestr(wheel.read(metadata).decode("utf-8")).get_payload()
    assert isinstance(description, str)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []
    pages = set(re.findall(r"`kvcache docs (\w+)`", description))
    assert {Path(name).stem for name in wheel.namelist() if name.startswith("kvcache/docs/")} >= pages
    assert "audit" in pages
