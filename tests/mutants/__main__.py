"""Do the quick tests notice small mistakes? `python -m tests.mutants --help`."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.covering import PACKAGES, Lines, Map, measure
from tests.mutants.mutations import AREAS, Mutation, chosen
from tests.mutants.trial import Outcome, Place
from tests.support.places import ROOT

DESCRIPTION = """\
Make one-line changes in copies of the product's code, one at a time, and say which of them the quick tests notice.

First the quick tests are run once under coverage.py (pip install coverage), to know which tests run which lines; a
change is then tried with those that run its line only, the quickest first. The same seed chooses the same changes in
other versions of the code as far as they have them. Nothing is changed in the tree itself.
"""
VERDICTS = ("survived", "not covered", "not imported", "killed")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        "python -m tests.mutants",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", help="files and directories with tests, if not all are to be run")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to take code and tests from; this one"
    )
    parser.add_argument("--mutants", type=int, default=40, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="at a time (default %(default)s)")
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        help="seconds of tests for each (default %(default)g); the rest is not run",
    )
    parser.add_argument(
        "--map",
        type=Path,
        help="a directory to keep what the run of all tests has said; if it is there, that run and its tree are used",
    )
    parser.add_argument("--list", action="store_true", help="say which changes there would be, and try none")
    parser.add_argument(
        "--coverage", action="store_true", help="say how much of the code the tests run, and stop"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    asked = options(arguments)
    if asked.list:
        for mutation in chosen(asked.tree, asked.mutants, asked.seed):
            print(spelled(mutation))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        place = asked.map.resolve() if asked.map is not None else Path(directory) / "map"
        if not place.exists():
            say("running the quick tests once, to know which of them run which lines")
            measure(asked.tree, place, asked.workers, asked.tests)
        known = Map(place)
        failed = [nodeid for nodeid, test in known.tests.items() if not test.passed]
        say(
            f"{len(known.tests):,} tests ran; left out are {len(failed):,} that failed while lines were counted"
        )
        for nodeid in failed:
            say(f"  {nodeid}")
        if asked.coverage:
            print(covered(known.lines()))
            return 0
        mutations = chosen(known.tree, asked.mutants, asked.seed)
        outcomes = tried(mutations, Path(directory), known, asked)
    print(table(mutations, outcomes))
    return 0


def tried(
    mutations: Sequence[Mutation], directory: Path, known: Map, asked: argparse.Namespace
) -> list[Outcome]:
    """Try each one, several at a time, each in a tree of its own."""
    places: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for number in range(asked.workers):
        places.put(Place(known.tree, directory / str(number)))
    done = 0

    def one(mutation: Mutation) -> Outcome:
        nonlocal done
        place = places.get()
        try:
            outcome = place.tried(mutation, known, asked.limit)
        finally:
            places.put(place)
        done += 1
        say(f"{done:3}/{len(mutations)}  {outcome.verdict:12}  {outcome.seconds:5.0f} s  {mutation.name}")
        return outcome

    with ThreadPoolExecutor(asked.workers) as pool:
        return list(pool.map(one, mutations))


def table(mutations: Sequence[Mutation], outcomes: Sequence[Outcome]) -> str:
    """What has become of each one, those that nobody noticed first, and how many there are in each area."""
    rows = sorted(zip(mutations, outcomes, strict=True), key=lambda row: VERDICTS.index(row[1].verdict))
    lines = []
    for mutation, outcome in rows:
        said = outcome.by or f"{outcome.tests:,} tests run it, {outcome.ran:,} were tried"
        lines += [f"{outcome.verdict}: {spelled(mutation)}", f"    {said}"]
    lines.append(f"\n{'':16}" + "".join(f"{verdict:>14}" for verdict in VERDICTS))
    for area in (*AREAS, ""):
        counts = Counter(outcome.verdict for mutation, outcome in rows if mutation.file.startswith(area))
        lines.append(f"{area or 'all':16}" + "".join(f"{counts[verdict]:14}" for verdict in VERDICTS))
    return "\n".join(lines)


def spelled(mutation: Mutation) -> str:
    """A mutation for people, on one line."""
    before, after = (
        textwrap.shorten(text, 70, placeholder=" …") for text in (mutation.before, mutation.after)
    )
    return f"{mutation.file}:{mutation.lines[-1]} {mutation.function}, {mutation.kind}: {before} → {after}"


def covered(lines: dict[str, Lines]) -> str:
    """How many lines were run of each file that has others, of each package, and of all."""
    said = [f"  {file:44} {each}" for file, each in lines.items() if each.run < each.there]
    for package in (*PACKAGES, ""):
        parts = [each for file, each in lines.items() if file.startswith(package)]
        whole = Lines(sum(each.there for each in parts), sum(each.run for each in parts))
        said.append(f"{package or 'all':46} {whole}")
    return "\n".join(said)


def say(line: str) -> None:
    """Tell of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
