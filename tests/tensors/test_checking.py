"""With `verify_secondary`, K/V that were changed in the file are not brought back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cuda_ops.copier import Copy, CopyFailed, FinishedTicket, Ticket
from events.types import PRIMARY, SECONDARY, TransferFailed
from kvcache.config import KVCacheConfig
from kvcache.device.transfers import CHANGED, CheckingCopier
from kvcache.errors import ComputationLost, ConfigError
from kvcache.inputs import Request
from tests.oracles.survivors import flip
from tests.support.engines import strategies
from tests.support.engines.byte_engine import at_once, late, late_and_failing
from tests.support.engines.fake_engine import FakeEngine

PROMPT = [0, 1, 2, 3, 4, 5, 6, 7]


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    file = {"secondary_path": str(directory / "secondary"), "model": "m", "verify_secondary": True}
    return {"log": directory / "log", "primary_blocks": 4, "secondary_blocks": 8, **file, **more}


def engine_with_prompt(directory: Path, **more: Any) -> FakeEngine:
    """PROMPT's four blocks lie in secondary."""
    engine = FakeEngine(**settings(directory, **more))
    for request_id, tokens in (("a", PROMPT), ("b", [9] * 8)):
        engine.admit(Request(request_id, tokens))
        engine.forward(request_id)
        engine.end(request_id)
    engine.settle()
    return engine


def spoil(engine: FakeEngine, directory: Path) -> None:
    """Change a byte of the prompt's last block."""
    found = engine.manager.match(PROMPT).blocks[-1]
    assert found.level == SECONDARY
    size = engine.manager.layout.groups[0].bytes_per_block
    flip(directory / "secondary", 4096 + found.slot * size + size // 2)


def test_a_block_that_has_changed_is_a_failed_copy(tmp_path: Path) -> None:
    """It reaches no sequence: everything cached goes, the request begins again, and the cache goes on."""
    engine = engine_with_prompt(tmp_path)
    spoil(engine, tmp_path)
    assert engine.admit(Request("c", PROMPT))[0].reused_tokens == 7
    engine.start_transfers()
    polled = engine.poll()
    assert {reason for _, reason in polled.failed} == {CHANGED}
    assert dict(polled.invalidated) == {"c": 0}
    assert engine.manager.count_reusable(PROMPT) == 0
    for request_id, tokens in (("c", None), ("d", [8] * 8), ("e", PROMPT)):
        if tokens is not None:
            engine.admit(Request(request_id, tokens))
        engine.forward(request_id)
        engine.end(request_id)
    engine.settle()
    engine.verify()


def test_what_was_restored_is_compared_too(tmp_path: Path) -> None:
    """A block that was right at the start and has changed since is not brought back."""
    engine = engine_with_prompt(tmp_path)
    engine.manager.close()
    engine.pools.close()
    again = FakeEngine(**settings(tmp_path))
    assert again.manager.restored is not None
    assert again.manager.restored.survey.verified == 4
    spoil(again, tmp_path)
    again.admit(Request("c", PROMPT))
    again.start_transfers()
    assert {reason for _, reason in again.poll().failed} == {CHANGED}


def note(failed: list[str], event: Any) -> None:
    failed.append(event.reason)


def churn(engine: FakeEngine, r: random.Random) -> None:
    """Prompts that come again, and do not all fit into primary."""
    for number in range(60):
        chat = [r.randrange(6)] * 4 + [7] * r.randrange(1, 5)
        try:
            engine.admit(Request(number, chat))
            engine.forward(number)
            engine.end(number)
        except ComputationLost:
            engine.poll()
            engine.end(number, store=False)
        if r.random() < 0.7:
            engine.poll()
    engine.settle()
    engine.verify()


@pytest.mark.parametrize("fill_blank", [False, True])
def test_nothing_right_is_refused(tmp_path: Path, fill_blank: bool) -> None:
    """With copies late and failing, no block is taken for another; many are compared."""
    compared = 0
    submit = CheckingCopier.submit

    def counted(self: CheckingCopier, copies: Sequence[Copy]) -> Ticket:
        """Count the checksums that are worked out meanwhile."""
        nonlocal compared
        file, size = engine.pools.secondary_file, engine.manager.layout.groups[0].bytes_per_block
        assert file is not None
        before = file.bytes_read
        ticket = submit(self, copies)
        compared += (file.bytes_read - before) // size
        return ticket

    with patch.object(CheckingCopier, "submit", counted):
        for seed in range(9):
            directory = tmp_path / str(seed)
            directory.mkdir()
            wrap = (at_once, late, late_and_failing(seed))[seed % 3]
            more = {"primary_blocks": 6, "secondary_blocks": 10 + seed, "debug_fill_blank": fill_blank}
            engine = FakeEngine(wrap, **settings(directory, **more))
            failed: list[str] = []
            engine.manager.bus.subscribe(partial(note, failed), TransferFailed)
            churn(engine, random.Random(seed))
            assert CHANGED not in failed
            assert bool(failed) == (seed % 3 == 2)
    assert compared > 200, compared


def test_it_needs_a_file() -> None:
    """Memory has no checksums, so that would promise what nobody keeps."""
    with pytest.raises(ConfigError, match="verify_secondary: given true; accepted: only with secondary_path"):
        strategies.config(secondary_blocks=2, verify_secondary=True)
    assert not KVCacheConfig.model_fields["verify_secondary"].default


class Bytes:
    """A file with one group, of whose slots the checksums are chosen; no block is moved."""

    def __init__(self, size: int) -> None:
        self.slots = np.arange(1, size + 1, dtype=np.uint64)

    def checksums(self, group: int, slots: Any) -> bytes:
        return self.slots[slots].tobytes()

    def submit(self, copies: Any) -> FinishedTicket:
        return FinishedTicket()


def test_a_slot_that_is_written_again_waits_for_its_last_copy(tmp_path: Path) -> None:
    """What the first of two copies has brought says nothing about what lies there then."""
    file: Any = Bytes(4)
    copier, slots = CheckingCopier(file, file), np.array([2], np.int32)
    copier.begin(engine_with_prompt(tmp_path, secondary_blocks=4).manager.state)
    write, read = Copy(PRIMARY, SECONDARY, slots, slots), Copy(SECONDARY, PRIMARY, slots, slots)

    def is_taken() -> bool:
        try:
            return copier.submit([read]).done()
        except CopyFailed:
            return False

    for _ in range(2):
        copier.submit([write])
    old = file.checksums(0, slots)
    file.slots[2] = 99
    copier.landed(0, slots, old)
    assert is_taken()
    copier.landed(0, slots, file.checksums(0, slots))
    assert is_taken()
    file.slots[2] = 98
    assert not is_taken()
