"""The examples that keep tensors, in examples/ and on pages, run as they stand and show what they promise."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.commands import Play
from tests.support.examples import snippet, snippets, source
from tests.support.places import ROOT

API = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "tutorials" / "tour.md").read_text(encoding="utf-8")
TRANSFORMERS = (ROOT / "docs" / "how-to" / "transformers.md").read_text(encoding="utf-8")


def test_engine_loop(play: Play) -> None:
    """It reuses the common start, moves blocks to host memory and back, prints its events, and its log replays."""
    code = source("engine_loop")
    done = play(code)
    assert done.err == ""
    assert "why=offload" in done.out
    assert "why=onboard" in done.out
    assert done.out.endswith(
        "prompt tokens that were reused: {'first': 0, 'second': 4, 'third': 8}\n"
        "the log replays to the same state: True\n"
    )
    assert len(code.splitlines()) <= 60


def test_tiny_llm(play: Play) -> None:
    """A model generates through the cache: branches, guesses, preemption and offload, and an answer stays the same."""
    code = source("tiny_llm")
    replayed, answers, reused, seconds = play(code).out.splitlines()
    found = re.fullmatch(r"19 answers, (\d+) preemptions, (\d+) right guesses", answers)
    assert found is not None
    assert min(map(int, found.groups())) > 0
    moved = [int(number) for number in re.findall(r"\d+", reused)]
    assert min(moved) > 0
    # How much sooner the second one came is no test's business: the machine may have been busy.
    assert re.fullmatch(r"seconds to the first token without and with reuse: [\d.]+ [\d.]+", seconds)
    assert replayed == "the log replays to the same state: True"
    assert len(code.splitlines()) <= 300
    (engine,) = (node for node in ast.parse(code).body if getattr(node, "name", "") == "Engine")
    assert (engine.end_lineno or 0) - engine.lineno < 80


@pytest.mark.parametrize("page", [README, TOUR], ids=["readme", "tour"])
def test_example_of_the_interface_runs(play: Play, page: str) -> None:
    """It runs as it stands, reuses the first prompt, and leaves no file behind."""
    done = play(snippet(page, "python", "KVCacheManager"))
    assert done.err == ""
    assert done.out.splitlines() == [
        "request-1: 0 of 100 prompt tokens were reused",
        "request-2: 99 of 100 prompt tokens were reused",
    ]


def test_api_examples_run(play: Play) -> None:
    """The pieces of code of the page, one after the other, are a program that runs."""
    pieces = snippets(API, "python")
    assert len(pieces) == 6
    assert play("\n".join(pieces)) == (0, "", "")


def test_tour_of_transformers_runs(play: Play) -> None:
    """It prints what stands below it."""
    done = play(snippet(TRANSFORMERS, "python", "for_model"))
    assert f"```\n{done.out}```\n" in TRANSFORMERS
