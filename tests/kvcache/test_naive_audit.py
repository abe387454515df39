"""docs/how-to/audit.md by example: each reason in a case worked out by hand, through the real manager and its log.

The oracle of the audit has nobody to judge it but these cases. Blocks have two tokens where nothing else is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader, LogWriter
from events.tokens import symbols
from events.types import (
    BlocksReused,
    CacheCreated,
    EventBatch,
    Gap,
    SequenceAdded,
    StateExported,
    SymbolsForgotten,
)
from kvcache.inputs import MultimodalItem
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from tests.oracles.naive_audit import REASONS, Admission, naive_audit
from tests.support.engines import strategies
from tests.support.engines.lives import NoBytes
from tests.support.engines.simulated import FailingCopier
from tests.support.logs.logs import frames_of, segments
from tests.support.logs.random_logs import BLIND, LossyLog, random_log, write_random_log


class Switch:
    """The batches of copies that fail: all while it is on."""

    on = False

    def __contains__(self, number: object) -> bool:
        return self.on


class Logged:
    """A manager that writes a log; partial blocks are no matter unless asked for."""

    def __init__(self, directory: Path, *, log: LogWriter | None = None, **settings: Any) -> None:
        self.directory = directory / "log"
        self.failing = Switch()
        self.settings = strategies.config(
            **({"enable_partial_reuse": False, "max_sequence_length": 16, "num_layers": 2} | settings)
        )
        self.manager = KVCacheManager(
            self.settings, log=log or self.directory, copier=FailingCopier(NoBytes(), self.failing)
        )

    def add(self, name: str, tokens: Sequence[int], computed: int = 0, **how: Any) -> None:
        """Admit a request, and report so many tokens of its prompt as computed."""
        self.manager.add_sequence(name, tokens, **how)
        self.manager.start_transfers()
        if computed:
            self.manager.store_context_blocks(name, computed)

    def serve(self, name: str, tokens: Sequence[int], **how: Any) -> None:
        """Admit a request, compute its whole prompt, end it, and end the step."""
        self.add(name, tokens, computed=len(tokens), **how)
        self.manager.remove_sequence(name)
        self.manager.flush()

    def crowd(self, name: str, blocks: int) -> None:
        """A request of so many blocks whose tokens nobody else has, and of which nothing stays."""
        first = 1000 * len(name) + 100 * ord(name[0])
        self.manager.add_sequence(name, range(first, first + blocks * self.settings.tokens_per_block))
        self.manager.remove_sequence(name, store=False)
        self.manager.start_transfers()
        self.manager.flush()

    def again(self, *, resumed: bool = False, log: LogWriter | None = None) -> None:
        """Close, and continue the log: with an empty cache, or with what the log says."""
        self.manager.close()
        state = replay(self.directory).state
        log = log or LogWriter(self.directory, resume=True)
        self.manager = (
            KVCacheManager.resume(state, log=log) if resumed else KVCacheManager(self.settings, log=log)
        )

    def audit(self) -> list[Admission]:
        """Close the log, and ask about all of it."""
        self.manager.close()
        return list(naive_audit(LogReader(self.directory)))

    def last(self) -> str:
        """The last admission's reasons, in words."""
        return reported(self.audit()[-1])


def reported(admission: Admission) -> str:
    """Equal reasons of consecutive tokens together."""
    return ", ".join(f"{len(list(same))} {reason}" for reason, same in groupby(admission.reasons))


# -- one reason after the other


def test_last_token_never_seen_and_unaligned(tmp_path: Path) -> None:
    """Of an empty cache: of 5 tokens two blocks end before the last one, of 4 only the first does."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [11, 12, 13, 14])
    log.serve("c", [21])
    assert log.audit() == [
        Admission("a", 1, ["never_seen"] * 4 + ["last_token"], {"never_seen": 4, "last_token": 1}),
        Admission(
            "b",
            2,
            ["never_seen", "never_seen", "unaligned", "last_token"],
            {"never_seen": 2, "unaligned": 1, "last_token": 1},
        ),
        Admission("c", 3, ["last_token"], {"last_token": 1}),
    ]


def test_primary_and_partial(tmp_path: Path) -> None:
    """Block 0 is reused whole, of block 1 the first token; what this block would be nobody had."""
    log = Logged(tmp_path, enable_partial_reuse=True)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [1, 2, 3, 9, 9, 9])
    assert log.last() == "2 primary, 1 partial, 1 never_seen, 1 unaligned, 1 last_token"


def test_a_partial_block_of_an_ended_request_is_not_cached(tmp_path: Path) -> None:
    """The ended request left one token of block 2, which is copied; block 2 itself nobody had."""
    log = Logged(tmp_path, enable_partial_reuse=True)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [1, 2, 3, 4, 5, 6, 7])
    assert log.last() == "4 primary, 1 partial, 1 never_seen, 1 last_token"


def test_a_block_whose_last_token_was_not_computed_is_not_cached(tmp_path: Path) -> None:
    """The ended request had the tokens of block 1, but had written only the first one."""
    log = Logged(tmp_path, enable_partial_reuse=True)
    log.add("a", [1, 2, 3])
    log.manager.add_tokens(["a"], [4])
    log.manager.remove_sequence("a")
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "2 primary, 1 partial, 1 never_seen, 1 last_token"


def test_equal_tokens_after_others_are_another_block(tmp_path: Path) -> None:
    """And so they are at another place."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [9, 9, 3, 4, 5])
    log.serve("c", [3, 4, 5])
    assert [reported(each) for each in log.audit()[1:]] == [
        "4 never_seen, 1 last_token",
        "2 never_seen, 1 last_token",
    ]


def test_secondary(tmp_path: Path) -> None:
    """All four primary blocks were needed, so both blocks went to secondary; of a second reuse they are back."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=4)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 4)
    log.serve("b", [1, 2, 3, 4, 6])
    log.serve("c", [1, 2, 3, 4, 7])
    assert [reported(each) for each in log.audit()[-2:]] == [
        "4 secondary, 1 last_token",
        "4 primary, 1 last_token",
    ]


def test_one_block_from_secondary(tmp_path: Path) -> None:
    """Three of four primary blocks were needed, two were blank: the deeper block went."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=4)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 3)
    log.serve("b", [1, 2, 3, 4, 6])
    assert log.last() == "2 primary, 2 secondary, 1 last_token"


def test_reuse_off(tmp_path: Path) -> None:
    """Everything but the last token, also what is not aligned."""
    log = Logged(tmp_path, enable_block_reuse=False)
    log.serve("a", [1, 2, 3, 4])
    log.serve("a", [1, 2, 3, 4])
    assert log.last() == "3 reuse_off, 1 last_token"


def test_unknown(tmp_path: Path) -> None:
    """Without tokens only what was reused is known, and what never can be."""
    log = Logged(tmp_path, log=LogWriter(tmp_path / "log", record_tokens=False), secondary_blocks=2)
    log.serve("a", [1, 2, 3, 4, 5, 6])
    log.serve("b", [1, 2, 3, 4, 7, 8, 9, 10])
    log.crowd("x", 5)
    log.serve("c", [1, 2, 3, 4, 5])
    assert [reported(each) for each in log.audit()] == [
        "4 unknown, 1 unaligned, 1 last_token",
        "4 primary, 2 unknown, 1 unaligned, 1 last_token",
        "8 unknown, 1 unaligned, 1 last_token",
        "4 primary, 1 last_token",
    ]


def test_not_servable(tmp_path: Path) -> None:
    """A window of 8, blocks of 4: block 1 is cached, but behind it token 8 sees block 0, which is gone."""
    log = Logged(tmp_path, tokens_per_block=4, primary_blocks=3, max_attention_window=8)
    log.add("a", range(11), computed=11)
    log.manager.add_tokens(["a"], [11])  # 12 tokens: block 0 is left behind
    log.add("x", range(100, 104))  # and taken
    log.manager.remove_sequence("a")
    log.manager.remove_sequence("x", store=False)
    log.add("b", range(9))
    assert log.last() == "4 evicted, 4 not_servable, 1 last_token"


def test_not_looked_up(tmp_path: Path) -> None:
    """All of the prompt but its last token, whether it is cached or not; the next request finds what was there."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [1, 2, 3, 4, 6, 7, 8, 9], lookup=False)
    log.serve("c", [1, 2, 3, 4, 6, 7, 8])
    assert [reported(each) for each in log.audit()[-2:]] == [
        "7 not_looked_up, 1 last_token",
        "6 primary, 1 last_token",
    ]


def test_computing_again(tmp_path: Path) -> None:
    """Evicted; the first request computes it again, which is running when the second one comes."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 8)
    log.add("b", [1, 2, 3, 4, 5])
    log.add("c", [1, 2, 3, 4, 6])
    assert [reported(each) for each in log.audit()[-2:]] == [
        "4 evicted, 1 last_token",
        "4 computing_again, 1 last_token",
    ]


def test_what_is_computed_again_and_stored_in_the_same_step_is_computed_again(tmp_path: Path) -> None:
    """The table's order: gone comes before the same step."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 8)
    log.add("b", [1, 2, 3, 4, 5])
    log.add("c", [1, 2, 3, 4, 6])
    log.manager.store_context_blocks("b", 4)
    assert log.last() == "4 computing_again, 1 last_token"


def test_what_a_running_request_has_computed_it_does_not_compute_again(tmp_path: Path) -> None:
    """A window of 5: the first block of the running request was left behind, and evicted. It has no need of it."""
    log = Logged(tmp_path, primary_blocks=8, max_attention_window=5)
    log.add("a", range(8), computed=8)
    log.crowd("x", 5)  # four are blank
    log.add("b", [0, 1, 100])
    assert log.last() == "2 evicted, 1 last_token"


def test_what_a_running_request_reuses_it_does_not_compute_again(tmp_path: Path) -> None:
    """A window of 3: token 8 sees nothing before block 3, so 8 tokens are reused, though blocks 0 and 1 are gone."""
    log = Logged(tmp_path, primary_blocks=6, max_attention_window=3)
    log.serve("a", range(9))
    log.crowd("x", 4)  # two are blank: blocks 0 and 1 go
    log.add("b", range(9))
    log.add("c", [0, 1, 100])
    assert [reported(each) for each in log.audit()[-2:]] == [
        "8 primary, 1 last_token",
        "2 evicted, 1 last_token",
    ]


def test_a_request_that_decodes_has_computed_its_prompt(tmp_path: Path) -> None:
    """Nobody said so but the appended token, which stores block 0; a draft says nothing of that kind."""
    log = Logged(tmp_path)
    log.add("a", [1, 2, 3])
    log.manager.flush()
    log.manager.add_tokens(["a"], [5], draft=True)
    log.add("b", [1, 2, 4])
    log.manager.flush()
    log.manager.add_tokens(["a", "b"], [5, 5])
    log.add("c", [1, 2, 6])
    assert [reported(each) for each in log.audit()[1:]] == [
        "2 being_computed, 1 last_token",
        "2 primary, 1 last_token",
    ]


def test_after_a_failed_copy_running_requests_compute_again(tmp_path: Path) -> None:
    """The first request had stored its blocks; now it begins again, so the next one finds it at work."""
    log = Logged(tmp_path, primary_blocks=8, secondary_blocks=4)
    log.serve("x", range(50, 61))
    log.add("a", [1, 2, 3, 4, 5], computed=5)
    log.failing.on = True
    log.crowd("y", 3)
    log.failing.on = False
    assert [name for name, _ in log.manager.poll().invalidated] == ["a"]
    log.add("b", [1, 2, 3, 4, 5])
    assert log.last() == "4 computing_copy_failed, 1 last_token"


@pytest.mark.parametrize(("restart", "reason"), [(False, "cleared"), (True, "restarted")])
def test_what_was_cleared_or_lost_and_is_computed_again(tmp_path: Path, restart: bool, reason: str) -> None:
    """Nothing was evicted; the first request computes it again, and the second one finds it at work."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    if restart:
        log.again()
    else:
        log.manager.clear()
    log.add("b", [1, 2, 3, 4, 5])
    log.add("c", [1, 2, 3, 4, 6])
    assert [reported(each) for each in log.audit()[-2:]] == [
        f"4 {reason}, 1 last_token",
        f"4 computing_{reason}, 1 last_token",
    ]


def test_evicted(tmp_path: Path) -> None:
    """Seven of eight blocks were needed, six were blank: the deeper block went."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 7)
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "2 primary, 2 evicted, 1 last_token"


def test_dropped(tmp_path: Path) -> None:
    """Two blocks went to secondary, and were displaced there by those of the next request."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=2)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 4)
    log.serve("b", [11, 12, 13, 14, 15])
    log.crowd("y", 4)
    log.serve("c", [1, 2, 3, 4, 5])
    assert log.last() == "4 dropped, 1 last_token"


def test_evicted_from_primary_although_there_is_secondary(tmp_path: Path) -> None:
    """What has a priority too low for secondary is removed from primary at once."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=2)
    log.add("a", [1, 2, 3, 4, 5], computed=5)
    log.manager.set_priority("a", 0)
    log.manager.remove_sequence("a")
    log.crowd("x", 4)
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "4 evicted, 1 last_token"


def test_cleared(tmp_path: Path) -> None:
    """Cleared is what nobody holds, and what a running request holds as well, which has computed it."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.add("b", [11, 12, 13, 14, 15], computed=4)
    log.manager.clear()
    log.add("c", [11, 12, 13, 14, 16])
    log.manager.remove_sequence("b", store=False)
    log.manager.remove_sequence("c", store=False)
    log.add("d", [11, 12, 13, 14, 16])
    log.add("e", [1, 2, 3, 4, 5])
    assert [reported(each) for each in log.audit()[2:]] == [
        "4 cleared, 1 last_token",
        "4 cleared, 1 last_token",
        "4 cleared, 1 last_token",
    ]


def test_what_went_before_the_cache_was_cleared_went_then(tmp_path: Path) -> None:
    """What removed a block last is told, not what would have."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 8)
    log.manager.clear()
    log.again()
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "4 evicted, 1 last_token"


def test_what_came_back_went_anew(tmp_path: Path) -> None:
    """It was evicted, cached again, and then cleared."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 8)
    log.serve("b", [1, 2, 3, 4, 5])
    log.manager.clear()
    log.serve("c", [1, 2, 3, 4, 5])
    assert log.last() == "4 cleared, 1 last_token"


def test_copy_failed(tmp_path: Path) -> None:
    """An offload fails: block 0, which stayed in primary, goes as block 1 does, which was on its way."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=4)
    log.serve("a", [1, 2, 3, 4, 5])
    log.failing.on = True
    log.crowd("x", 3)
    log.failing.on = False
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "4 copy_failed, 1 last_token"


def test_cleared_and_failed_in_one_batch(tmp_path: Path) -> None:
    """Whoever clears the cache ends the step, and with it learns that a copy failed: by its batch all of it failed."""
    log = Logged(tmp_path, primary_blocks=4, secondary_blocks=4)
    log.serve("a", [1, 2, 3, 4, 5])
    log.failing.on = True
    log.add("x", [11, 12, 13, 14, 15])
    log.manager.clear()
    log.failing.on = False
    log.manager.remove_sequence("x", store=False)
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "4 copy_failed, 1 last_token"


def test_restarted(tmp_path: Path) -> None:
    """A new process begins with an empty cache; what it stores itself is found."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3, 4, 5])
    log.again()
    log.serve("b", [1, 2, 3, 4, 5])
    log.serve("c", [1, 2, 3, 4, 5])
    assert [reported(each) for each in log.audit()[1:]] == [
        "4 restarted, 1 last_token",
        "4 primary, 1 last_token",
    ]


def test_a_request_that_ended_with_its_process_computes_nothing(tmp_path: Path) -> None:
    """It was running when the process ended, so its second block never was cached, and nobody computes it."""
    log = Logged(tmp_path)
    log.add("a", [1, 2, 3, 4, 5], computed=2)
    log.again()
    log.serve("b", [1, 2, 3, 4, 5])
    assert log.last() == "2 restarted, 2 never_seen, 1 last_token"


def test_a_process_that_goes_on_with_an_exported_state(tmp_path: Path) -> None:
    """What is in the state is cached, in both levels, and who runs in it is computing its prompt still."""
    log = Logged(tmp_path, primary_blocks=8, secondary_blocks=4)
    log.serve("a", [1, 2, 3, 4, 5])
    log.crowd("x", 7)
    log.add("q", [11, 12, 13, 14, 15], computed=1)
    log.add("r", [21, 22, 23])
    log.manager.add_tokens(["r"], [24])
    log.again(resumed=True)
    log.add("b", [1, 2, 3, 4, 5])
    log.manager.remove_sequence("b", store=False)
    log.add("c", [11, 12, 13, 14, 15])
    log.manager.remove_sequence("c", store=False)
    log.add("d", [21, 22, 23, 24, 25])
    assert [reported(each) for each in log.audit()[-3:]] == [
        "2 primary, 2 secondary, 1 last_token",
        "4 being_computed, 1 last_token",
        "2 primary, 2 never_seen, 1 last_token",  # block 0 is computed, block 1 generated
    ]


@pytest.mark.parametrize(
    ("secondary", "third"),
    [(0, "4 evicted, 2 not_servable, 1 last_token"), (2, "2 primary, 2 secondary, 2 primary, 1 last_token")],
)
def test_an_exported_state_of_a_sliding_window(tmp_path: Path, secondary: int, third: str) -> None:
    """A window of 5: of five blocks the first two are evicted, which are holes in what is exported, or in secondary.

    Token 10 sees blocks 3 and 4, which is enough. Token 6 sees blocks 1 and 2, of which one is gone, or is brought
    back; block 0 is reused without being taken from anywhere, which counts as primary.
    """
    log = Logged(tmp_path, primary_blocks=9, secondary_blocks=secondary, max_attention_window=5)
    log.add("a", range(10), computed=10)  # blocks 0 and 1 are left behind
    log.crowd("x", 6)  # four are blank
    log.again(resumed=True)
    log.add("b", range(11))
    log.manager.remove_sequence("a")
    log.manager.remove_sequence("b", store=False)
    log.add("c", [0, 1, 2, 3, 4, 5, 100])
    assert [reported(each) for each in log.audit()[-2:]] == [
        "10 primary, 1 last_token",
        third,
    ]


def test_batches_that_were_lost(tmp_path: Path) -> None:
    """What was evicted meanwhile is restarted, what was stored meanwhile is cached, what stayed stays.

    Who ended meanwhile computes nothing. The batch that ends the loss also has an admission, before the gap. It cannot
    be judged, so it is left out.
    """
    writer = LossyLog(tmp_path / "log")
    log = Logged(tmp_path, log=writer, primary_blocks=10)
    log.serve("a", [1, 2, 3, 4, 5])
    log.serve("b", [11, 12, 13, 14, 15])
    log.add("r", [41, 42, 43])
    log.manager.flush()
    writer.losing = True
    log.manager.remove_sequence("r", store=False)
    log.crowd("x", 7)  # six are blank: the deeper block of a goes
    log.serve("c", [21, 22, 23])
    writer.losing = False
    log.serve("lost", [31, 32, 33])
    log.serve("d", [1, 2, 3, 4, 5])
    log.serve("e", [11, 12, 13, 14, 15])
    log.serve("f", [21, 22, 23])
    log.serve("g", [41, 42, 43])
    admissions = log.audit()
    gaps = [event for batch in LogReader(log.directory) for event in batch.events if isinstance(event, Gap)]
    assert len(gaps) == 1
    assert [f"{each.request_id}: {reported(each)}" for each in admissions[3:]] == [
        "d: 2 primary, 2 restarted, 1 last_token",
        "e: 4 primary, 1 last_token",
        "f: 2 primary, 1 last_token",
        "g: 2 never_seen, 1 last_token",
    ]


def test_out_of_window(tmp_path: Path) -> None:
    """Windows of 4 and of all, blocks of 4. The log begins when the small window has not got block 0 (any more)."""
    log = Logged(tmp_path, tokens_per_block=4, max_attention_window=(4, 16), primary_blocks=(3, 6))
    log.serve("a", range(9))
    log.crowd("x", 2)  # of the small window, block 0 goes: two are cached, one is blank
    log.manager.close()
    log.manager = KVCacheManager.resume(replay(log.directory).state, log=tmp_path / "second")
    log.directory = tmp_path / "second"
    log.add("b", [0, 1, 2, 3, 100, 101])
    assert reported(log.audit()[-1]) == "4 out_of_window, 1 unaligned, 1 last_token"


def test_the_first_window_that_has_it_not_gives_the_reason(tmp_path: Path) -> None:
    """The small window needs none of block 0, which is evicted there only; then both have lost it, each in its way."""
    log = Logged(tmp_path, tokens_per_block=4, max_attention_window=(4, 16), primary_blocks=(3, 6))
    log.serve("a", range(9))
    log.crowd("x", 2)  # of the small window, block 0 goes: two are cached, one is blank
    log.manager.flush()
    log.add("b", [0, 1, 2, 3, 100])
    log.manager.remove_sequence("b", store=False)
    log.manager.clear()
    log.add("c", [0, 1, 2, 3, 100])
    log.manager.remove_sequence("c", store=False)
    log.add("d", range(9))
    assert [reported(each) for each in log.audit()[2:]] == [
        "4 evicted, 1 last_token",
        "4 evicted, 1 last_token",
        "4 evicted, 4 cleared, 1 last_token",
    ]


def test_same_step_and_being_computed(tmp_path: Path) -> None:
    """Of the running request's prompt one block is stored in the batch of the admission, the next one behind it."""
    log = Logged(tmp_path)
    log.add("a", [1, 2, 3, 4, 5])
    log.add("b", [1, 2, 3, 4, 5])
    log.manager.store_context_blocks("a", 3)
    log.manager.flush()
    log.manager.store_context_blocks("a", 4)
    assert [reported(each) for each in log.audit()] == [
        "4 never_seen, 1 last_token",
        "2 same_step, 2 being_computed, 1 last_token",
    ]


def test_only_whole_blocks_of_a_running_prompt_are_being_computed(tmp_path: Path) -> None:
    """The second block of the running request is filled by what it generates, which nobody could know."""
    log = Logged(tmp_path)
    log.add("a", [1, 2, 3])
    log.manager.flush()
    log.add("b", [1, 2, 3, 4, 5])
    log.manager.remove_sequence("a")
    log.add("c", [1, 2, 3, 6, 7])
    assert [reported(each) for each in log.audit()[1:]] == [
        "2 being_computed, 2 never_seen, 1 last_token",
        "2 being_computed, 2 never_seen, 1 last_token",  # b is running
    ]


def test_decoded_blocks_are_found_and_lost_like_others(tmp_path: Path) -> None:
    """Decoding fills block 1 and 2 (`BlocksStored`, then `BlocksFilled`); they are reused, and evicted."""
    log = Logged(tmp_path)
    log.add("a", [1, 2, 3])
    for token in (4, 5, 6, 7):
        log.manager.add_tokens(["a"], [token])
    log.manager.remove_sequence("a")
    log.manager.flush()
    log.add("b", range(1, 8))
    log.manager.remove_sequence("b", store=False)
    log.crowd("x", 7)
    log.add("c", range(1, 8))
    assert [reported(each) for each in log.audit() if each.request_id in ("b", "c")] == [
        "6 primary, 1 last_token",
        "2 primary, 4 evicted, 1 last_token",
    ]


def test_other_namespace(tmp_path: Path) -> None:
    """Cached for a tenant, asked for by others; what the first one generated counts as what it was asked."""
    log = Logged(tmp_path, primary_blocks=12)
    log.add("a", [1, 2, 3], computed=3, cache_salt="tenant")
    log.manager.add_tokens(["a"], [4])
    log.manager.add_tokens(["a"], [5])
    log.manager.remove_sequence("a")
    log.add("b", [1, 2, 3, 4, 5])
    log.add("c", [1, 2, 3, 4, 5], lora_id=1)
    log.add("d", [1, 2, 3, 4, 5], cache_salt="tenant")
    log.add("e", [1, 9, 3])
    assert [reported(each) for each in log.audit()[1:]] == [
        "4 other_namespace, 1 last_token",
        "4 other_namespace, 1 last_token",
        "4 primary, 1 last_token",
        "2 never_seen, 1 last_token",
    ]


def test_what_another_namespace_had_is_not_in_it_any_more(tmp_path: Path) -> None:
    """It counts only while it is cached; and what is gone from the own namespace is told first."""
    log = Logged(tmp_path)
    log.serve("a", [1, 2, 3], cache_salt="tenant")
    log.crowd("x", 8)
    log.serve("b", [1, 2, 3])
    log.crowd("y", 8)
    log.serve("c", [1, 2, 3], cache_salt="tenant")
    log.serve("d", [1, 2, 3])
    assert [reported(each) for each in log.audit() if each.request_id in ("b", "c", "d")] == [
        "2 never_seen, 1 last_token",
        "2 evicted, 1 last_token",
        "2 evicted, 1 last_token",
    ]


def test_symbols_that_stand_for_something_else_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third image gets the numbers of the first, and was never seen; the first one, by other numbers, was."""
    monkeypatch.setattr(symbols, "FORGET_ABOVE", 1)
    log = Logged(tmp_path)
    for name, digit in (("a", 1), ("b", 2), ("c", 3), ("d", 1)):
        log.serve(name, [7, 7, 8], multimodal=[MultimodalItem(bytes([digit]) * 32, 0, 2)])
        log.crowd(f"x{name}", 8)
    admissions = log.audit()
    events = [event for batch in LogReader(log.directory) for event in batch.events]
    first, _, third, last = [
        event.tokens for event in events if isinstance(event, SequenceAdded) and event.num_tokens == 3
    ]
    assert first == third != last
    assert any(isinstance(event, SymbolsForgotten) for event in events)
    assert [reported(each) for each in admissions[::2]] == [
        "2 never_seen, 1 last_token",
        "2 never_seen, 1 last_token",
        "2 never_seen, 1 last_token",
        "2 evicted, 1 last_token",
    ]


# -- random programs

SEEDS = (*range(11), BLIND, BLIND + 1)


@pytest.fixture(scope="module")
def random_logs(tmp_path_factory: pytest.TempPathFactory) -> list[list[EventBatch]]:
    """The batches of so many logs."""
    parent = tmp_path_factory.mktemp("logs")
    return [list(LogReader(random_log(seed, parent / str(seed)))) for seed in SEEDS]


def test_a_seed_gives_one_log(tmp_path: Path) -> None:
    """The same frames, so that what was found can be found again."""
    first, again = [write_random_log(3, tmp_path / name) for name in ("first", "again")]
    names = [[path.name for path in segments(log)] for log in (first, again)]
    assert len(names[0]) > 1
    assert names[0] == names[1]
    assert frames_of(first) == frames_of(again)


def judged(batches: Sequence[EventBatch]) -> list[SequenceAdded]:
    """The admissions that have reasons: all but those before a gap in its batch."""
    found: list[SequenceAdded] = []
    for batch in batches:
        before = len(found)
        for event in batch.events:
            if isinstance(event, Gap):
                del found[before:]
            elif isinstance(event, SequenceAdded):
                found.append(event)
    return found


def test_laws_of_random_logs(random_logs: list[list[EventBatch]]) -> None:
    """Each token has one reason of the table; the last is `last_token`, and just the first `reused` ones are reused."""
    for batches in random_logs:
        for event, admission in zip(judged(batches), naive_audit(batches), strict=True):
            assert admission.request_id == event.request_id
            assert len(admission.reasons) == event.num_tokens == sum(admission.sums.values())
            assert admission.sums == Counter(admission.reasons)
            assert set(admission.sums) <= set(REASONS)
            reused = [reason in ("primary", "secondary", "partial") for reason in admission.reasons]
            assert reused == [True] * event.reused + [False] * (event.num_tokens - event.reused)
            assert admission.sums.get("partial", 0) == event.reused_partial
            assert [reason == "last_token" for reason in admission.reasons].index(
                True
            ) == event.num_tokens - 1


def test_reasons_that_need_certain_windows(random_logs: list[list[EventBatch]]) -> None:
    """Where every window attends to everything, what is cached is closed under prefixes, and no window lags behind."""
    for batches in random_logs:
        created = next(event for event in batches[0].events if isinstance(event, CacheCreated))
        met = {reason for admission in naive_audit(batches) for reason in admission.sums}
        sliding = any(group.kind == "sliding" for group in created.groups)
        assert sliding or not met & {"not_servable", "out_of_window"}
        assert len(created.groups) > 1 or "out_of_window" not in met


def test_random_logs_meet_every_reason(random_logs: list[list[EventBatch]]) -> None:
    """No reason of the table is without a case, and all but the one that takes an exported state have several."""
    met: Counter[str] = Counter()
    for batches in random_logs:
        for admission in naive_audit(batches):
            met.update(set(admission.reasons))
    of_others = {"external", "last_hit", "not_reused", "invalidated", "computing_invalidated"}
    assert set(met) == set(REASONS) - of_others, "which only logs of other engines have"
    assert min(count for reason, count in met.items() if reason != "out_of_window") >= 2, met


def test_random_logs_have_what_makes_them_worth_reading(random_logs: list[list[EventBatch]]) -> None:
    """Several admissions in a batch, secondary claims, gaps, exported states with content and running sequences."""
    events = [event for batches in random_logs for batch in batches for event in batch.events]
    states = [event for event in events if isinstance(event, StateExported)]
    assert sum(bool(state.sequences) for state in states) >= 5
    assert any(isinstance(event, BlocksReused) and event.level for event in events)
    assert any(isinstance(event, SymbolsForgotten) for event in events)
    assert any(isinstance(event, Gap) for event in events)
    several = [
        batch
        for batches in random_logs
        for batch in batches
        if sum(isinstance(event, SequenceAdded) for event in batch.events) > 2
    ]
    assert len(several) >= 50
