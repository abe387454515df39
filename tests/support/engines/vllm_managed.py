"""Random programs for vLLM's own scheduler with a manager of ours, and a worker that checks all that is read.

    python -m tests.support.engines.vllm_managed FIRST LAST

prints a line of JSON: how often what happened. Runs where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from events.log import LogReader
from kvcache.audit.totals import audit_batches
from kvcache.fold.fingerprint import fingerprint
from kvcache.integrations.vllm.plugin import register
from kvcache.replay import replay
from kvcache.whatif.trial import Trial, play
from tests.support.engines.vllm_programs import Program, Shape
from tests.support.engines.vllm_worker import CheckingWorker

STUCK = (62,)
"""Seeds of programs that did not end once, which are run beside the others: a request that is not looked up needed more
than half the cache, where its prompt was cached already."""


class ManagedProgram(Program):
    """An engine whose blocks are ours to give."""

    sessions = False

    def _choose_shape(self, hybrid: bool) -> Shape:
        shape = super()._choose_shape(hybrid)
        self.partial = self.rng.random() < 0.5
        return shape._replace(window=None, on_failure=None, eagle=False)

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings["settings"] |= {
            "enable_partial_reuse": self.partial,
            "evict_ahead": self.rng.choice((0, 1, 8)),
        }
        return settings | {"mode": "manager"}

    def run(self) -> None:
        """All of it, checked after each step."""
        self.engine.worker = worker = CheckingWorker(self.shape.block_size)
        manager, used = self.engine.scheduler.kv_cache_manager, 0.0
        for _ in self.steps():
            manager.recorder.check()
            for served in manager._serving.values():
                # Fewer if it was not scheduled, as where a request of a higher priority was preempted in its step.
                assert len(served.given) <= len(served.sequence.tables[0])
            used = manager.usage
        assert not manager.recorder.state.sequences
        assert used == 0
        self.seen += worker.seen
        self._compare_log()

    def _compare_log(self) -> None:
        replayed = replay(self.log, verify=True)
        assert replayed.end is not None
        assert (replayed.end.kind, replayed.checkpoints_failed) == ("clean", [])
        state = self.engine.attached.recorder.state
        assert fingerprint(replayed.state) == fingerprint(state)
        audit = audit_batches((batch, True) for batch in LogReader(self.log))
        assert audit.reused == self.engine.hits, (audit.reused, self.engine.hits)
        self.seen.update(
            {
                "admitted": audit.requests,
                "hits": audit.reused,
                "refused": audit.refusals,
                "ahead": self.shape.runs_ahead,
                "drafts": self.shape.drafts > 0,
                "priorities": self.shape.by_priority,
                "replaced": sum(
                    len(getattr(each, "replaced", b"")) > 0
                    for batch in LogReader(self.log)
                    for each in batch.events
                ),
            }
        )
        if self.shape.record_tokens:
            then, again = play(self.log, [Trial({})])
            self.seen["played"] += then.tally.requests
            self.seen["played alike"] += then.tally == again.tally


def main(first: int, last: int) -> None:
    """Run these seeds."""
    register()
    seen = Counter[str]()
    for seed in (*range(first, last), *STUCK):
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
            program = ManagedProgram(seed, Path(directory))
            try:
                program.run()
            except BaseException:
                print(f"seed {seed}: {program.shape}, partial reuse {program.partial}", file=sys.stderr)
                raise
        seen += program.seen
        seen["programs"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
