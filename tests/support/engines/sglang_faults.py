"""The recorder breaks while SGLang's scheduler works: its decisions are the same, and the log is closed.

    python -m tests.support.engines.sglang_faults SEED MODEL

prints how often it broke, as JSON. Runs where SGLang is installed.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvcache import Recorder
from kvcache.integrations.sglang.plugin import VARIABLE, _made, register
from kvcache.integrations.sglang.recording import SGLangRecording
from kvcache.integrations.sglang.windows import WindowPages
from kvcache.replay import replay
from tests.support.engines.faults import SECRET, Messages, Place, broken
from tests.support.engines.sglang_programs import Program
from tests.support.engines.stock_sglang import StockSGLang

CALLS = ("extended", "inserting", "inserted", "released", "freed", "reset", "stepped", "refused")
"""Of a recording, by SGLang."""
EVENTS = (
    *("admitted", "refused", "allocated", "grown", "computed", "stored", "replaced", "appended"),
    *("ended", "evicted", "cleared", "flush", "close"),
)
"""Of a recorder, by a recording."""
PLACES: dict[str, list[Place]] = {
    "full": [(SGLangRecording, name) for name in CALLS] + [(Recorder, name) for name in EVENTS],
    "sliding": [
        (SGLangRecording, "acting"),
        *((WindowPages, name) for name in ("freed", "reset", "settle", "admit", "allocate", "store", "end")),
        *((Recorder, name) for name in ("taken", "left", "named", "unnamed", "replaced", "evicted")),
    ],
}
RARE = ("reset", "cleared", "close")
"""Of these the first call breaks."""
STEPS = 250


def decisions(engine: StockSGLang, seed: int) -> list[Any]:
    """What SGLang decides in a program: the state of each request after each step."""
    found = list[Any]()

    def look(_: StockSGLang) -> None:
        found.append(
            [
                (name, each.prefix_len, each.kv.kv_allocated_len, list(each.output_ids))
                for name, each in engine.requests.items()
            ]
        )

    program = Program(seed, engine, look)
    program.last_step = STEPS
    engine.serve(program.before_step)
    assert engine.scheduler.flush_cache()
    return found


def main(seed: int, model: str) -> None:
    """Break every place once."""
    # Else what it has learned of lengths would go on in the next program.
    os.environ |= {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.5", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1"}
    # Of leaves that were used at the same time, SGLang evicts now this one, now that one.
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    os.environ[VARIABLE] = "/dev/null/nothing"
    register()
    messages, seen, rng = Messages(), Counter[str](), random.Random(seed)
    logging.getLogger("sglang.kvcache").addHandler(messages)
    with tempfile.TemporaryDirectory() as directory:
        engine = StockSGLang(
            Path(directory),
            640,
            model,
            page_size=rng.choice((1, 16)),
            chunked_prefill_size=64,
            radix_eviction_policy="fifo",
        )
        assert engine.attached is None
        assert sum("is not recorded" in text for text in messages.texts) == 1
        stock = decisions(engine, seed)
        plain = set(vars(engine.cache)), set(vars(engine.scheduler))
        for number, place in enumerate([None, *PLACES[model]]):
            messages.texts.clear()
            log = Path(directory) / str(number)
            at = 1 if place and place[1] in RARE else rng.randrange(1, 20)
            with broken(place, at) if place else nullcontext():
                os.environ[VARIABLE] = str(log)
                _made(None, engine.scheduler)
                attached: Any = engine.attached
                found, to_the_end = decisions(engine, seed), attached.attached
                attached.close()
            assert place or to_the_end, messages.texts
            assert found == stock, f"{place} changes what SGLang decides"
            warned = [text for text in messages.texts if "no longer recorded" in text]
            assert SECRET not in " ".join(messages.texts)
            end = replay(log, verify=True).end
            assert end is not None
            assert end.kind == "clean", (place, end)
            if warned:
                assert len(warned) == 1
                assert end.next_seq - (end.last_seq or 0) == 2, place
                seen[place[1] if place else ""] += 1
            assert set(vars(engine.cache)) - plain[0] <= {"_kvcache_refused"}
            assert set(vars(engine.scheduler)) - plain[1] <= {"_kvcache_attached"}
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
