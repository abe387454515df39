"""The recorder breaks while vLLM's scheduler works: its decisions are the same, and the log is closed.

    python -m tests.support.engines.vllm_faults FIRST LAST

prints how often it broke, as JSON. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvcache import Recorder
from kvcache.integrations.vllm.plugin import register
from kvcache.integrations.vllm.recording import Recording
from kvcache.replay import replay
from tests.support.engines.faults import SECRET, Messages, Place, broken
from tests.support.engines.vllm_programs import Program

CALLS = ("taken", "allocated", "freed", "reset", "unnamed", "counted", "stepped")
"""Of a recording, by vLLM."""
HYBRID_CALLS = ("allocated_in_groups", "naming", "name_given", "names_taken", "allocating", "skipped")
EVENTS = (
    *("admitted", "refused", "allocated", "grown", "computed", "not_loaded", "stored", "filled", "appended"),
    *("ended", "evicted", "invalidated", "cleared", "counted", "flush", "close"),
)
"""Of a recorder, by a recording."""
HYBRID_EVENTS = ("taken", "left", "named", "unnamed", "deferred")
PLACES: dict[bool, list[Place]] = {
    False: [(Recording, name) for name in CALLS] + [(Recorder, name) for name in EVENTS],
    True: [(Recording, name) for name in (*CALLS, *HYBRID_CALLS)]
    + [(Recorder, name) for name in (*EVENTS, *HYBRID_EVENTS)],
}
"""What can break, without and with layers of several kinds."""
A_PROGRAM = 8
"""So many places are broken in each."""
RARE = ("reset", "unnamed", "not_loaded", "invalidated", "cleared", "deferred", "close")
"""Of these the first call breaks."""


def decisions(seed: int, *, recorded: bool, hybrid: bool) -> tuple[list[Any], bool]:
    """What vLLM decides, and whether it was recorded to the end."""
    with tempfile.TemporaryDirectory() as directory:
        program = Program(seed, Path(directory), recorded=recorded, hybrid=hybrid)
        program.engine.remembers = True
        listens = recorded
        for _ in program.steps():
            listens = recorded and program.attached.attached
        if recorded:
            end = replay(program.log, verify=True).end
            assert end is not None
            assert end.kind == "clean", end
            lost = end.next_seq - (end.last_seq or 0) - 1
            assert lost in ((0, 1) if listens else (1,)), end
            listens = not lost
        return program.engine.decisions, listens


def main(first: int, last: int) -> None:
    """Break some of the places once for each seed."""
    register()
    messages, seen = Messages(), Counter[str]()
    logging.getLogger("vllm.kvcache").addHandler(messages)
    for seed in range(first, last):
        rng, hybrid = random.Random(seed), bool(seed % 2)
        stock, _ = decisions(seed, recorded=False, hybrid=hybrid)
        for place in rng.sample(PLACES[hybrid], A_PROGRAM):
            messages.texts.clear()
            with broken(place, 1 if place[1] in RARE else rng.randrange(1, 40)):
                found, to_the_end = decisions(seed, recorded=True, hybrid=hybrid)
            assert found == stock, f"seed {seed}: {place} changes what vLLM decides"
            warned = [text for text in messages.texts if "no longer recorded" in text]
            assert len(warned) == (not to_the_end), (seed, place, messages.texts)
            assert SECRET not in " ".join(messages.texts)
            seen[place[1]] += not to_the_end
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
