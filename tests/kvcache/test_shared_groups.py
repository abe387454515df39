"""Which group of layers lost a hit that full attention had: against docs/how-to/audit.md, one position at a time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader, LogWriter
from events.types import PoolShared, SharingGroup
from kvcache import KVCacheConfig, LayerGroup, Recorder
from kvcache.audit.admission import SharedGroups
from kvcache.audit.explanation import PromptPart, explain_request
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import audit_batches
from kvcache.errors import UsageError
from kvcache.whatif.commands import recorded
from tests.support.commands import Kvcache
from tests.support.engines.hybrid_toy import NAME_BYTES, key_of
from tests.support.seeds import seeds

SIZE = 4
PROMPT = list(range(20, 45))
KEYS = [key_of(PROMPT[: end * SIZE]) for end in range(1, 7)]


def suits(group: SharingGroup, named: set[int], position: int) -> bool:
    """Whether a group can go on behind a position, as the table of the page says."""
    own, window = group.tokens_per_block, group.window
    if position % own:
        return position == 0
    ends = set(range(own, position + 1, own))
    if group.kind == "sliding":
        blocks = -(-(window - 1) // own)
        ends = {end for end in ends if end > position - blocks * own}
    elif group.kind == "chunked":
        ends = {end for end in ends if end > position // window * window}
    elif group.kind == "state":
        ends = {position} - {0}
    elif group.kind == "uncached":
        ends = set()
    return all(end in named or end % SIZE for end in ends)


def suits_before(group: SharingGroup, named: set[int], position: int, known: int) -> bool:
    """The same for an engine that computes the block behind it again: all but states must have that, too."""
    after = position + max(group.tokens_per_block, SIZE)
    further = group.kind in ("state", "uncached") or (after <= known and suits(group, named, after))
    return suits(group, named, position) and (position == 0 or further)


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("seed", seeds(range(400), quick=40))
def test_the_group_to_blame(seed: int, drops_last: bool) -> None:
    """Of random groups with random names."""
    rng = random.Random(seed)
    kinds = ("full", "sliding", "chunked", "state", "uncached")
    made, named = list[SharingGroup](), list[set[int]]()
    keys = [rng.randbytes(NAME_BYTES) for _ in range(12)]
    for _ in range(rng.randrange(1, 4)):
        kind, own = rng.choice(kinds), rng.choice((2, 4, 8, 12))
        window = rng.randrange(1, 30) if kind == "sliding" else own * rng.randrange(1, 4)
        ends = {end for end in range(SIZE, SIZE * 13, SIZE) if rng.random() < 0.8}
        has = b"".join(keys[end // SIZE - 1] for end in ends)
        made.append(SharingGroup(kind, own, window if kind in ("sliding", "chunked") else 0, keys=has))
        named.append(ends)
    groups, blocks = SharedGroups(), rng.randrange(1, 13)
    groups.begin(PoolShared(tuple(made)), 1, NAME_BYTES)
    names = np.frombuffer(b"".join(key[:8] for key in keys[:blocks]), np.uint64)
    found = groups.lacking(names, 0, SIZE, drops_last=drops_last)
    known, blocks = blocks * SIZE, blocks - drops_last
    hits = [
        [
            end
            for end in range(0, blocks * SIZE + 1, SIZE)
            if (suits_before(group, ends, end, known) if drops_last else suits(group, ends, end))
        ]
        for group, ends in zip(made, named, strict=True)
    ]
    common = max(set.intersection(*map(set, hits)))
    if common == blocks * SIZE:
        assert found is None
    else:
        assert found is not None
        assert (found.first_block * SIZE, found.stop_block) == (common, blocks)
        longest = [max(each) for each in hits]
        assert found.group == 1 + longest.index(min(longest))


class Engine:
    """A recorder with full attention and states, and a request a whose prompt is cached in both."""

    def __init__(self, log: Path, *, drops_last_hit: bool = False) -> None:
        self.log = log
        config = KVCacheConfig(tokens_per_block=SIZE, primary_blocks=16, max_sequence_length=64)
        self.recorder = Recorder(
            config,
            engine="toy",
            log=log,
            name_bytes=NAME_BYTES,
            groups=[LayerGroup("sliding", SIZE, 5, 1), LayerGroup("state", 2 * SIZE, 0, 3)],
            drops_last_hit=drops_last_hit,
            wall_ns=iter(range(10**18, 10**19, 10**9)).__next__,
        )
        reported = self.recorder
        reported.admitted("a", PROMPT)
        reported.allocated("a", range(7))
        reported.taken("a", [0, 1, 2], [7, 8, 9], group=1)
        reported.taken("a", [0, 1, 2], [10, 11, 12], group=2)
        reported.computed("a", len(PROMPT))
        reported.stored("a", 6, b"".join(KEYS))
        reported.named("a", [7, 8, 9], [KEYS[0], KEYS[1], KEYS[2]], [4, 8, 12], group=1)
        reported.named("a", [10, 11], [KEYS[1], KEYS[3]], [8, 16], group=2)
        reported.ended("a")
        reported.flush()

    def parts(self, name: str, reused: list[int]) -> list[PromptPart]:
        """Admit a's prompt once more, and explain it."""
        self.recorder.admitted(name, PROMPT, reused)
        self.recorder.close()
        (found,) = explain_request(LogReader(self.log), name)
        return found.stays[0].parts


def test_what_is_there_is_served(tmp_path: Path) -> None:
    """Up to where all have it; what comes behind had never been kept, in states as in the window: the window is blamed,
    which can go on behind less.
    """
    parts = Engine(tmp_path / "log").parts("b", [0, 1])
    assert [(each.reason, each.first_block, each.last_block, each.group) for each in parts] == [
        (Reason.PRIMARY, 0, 1, None),
        (Reason.NOT_SERVABLE, 2, 5, 1),
        (Reason.LAST_TOKEN, 6, 6, None),
    ]
    assert (parts[1].kind, parts[1].gone, parts[1].stored_by) == ("sliding", None, "a")


def test_what_was_evicted_is_named_with_who_needed_it(tmp_path: Path) -> None:
    """A state at 8 was evicted for c, and nothing else suits all groups."""
    engine = Engine(tmp_path / "log")
    engine.recorder.admitted("c", [1, 2, 3])
    engine.recorder.unnamed([10], KEYS[1], "c", group=2)
    engine.recorder.taken("c", [0], [10], group=2)
    engine.recorder.unnamed([11], KEYS[3], group=2)
    engine.recorder.flush()
    parts = engine.parts("b", [])
    assert [(each.reason, each.first_block, each.last_block, each.group) for each in parts] == [
        (Reason.NOT_SERVABLE, 0, 5, 2),
        (Reason.LAST_TOKEN, 6, 6, None),
    ]
    assert parts[0].kind == "state"
    audit = audit_batches((batch, True) for batch in LogReader(engine.log))
    assert audit.lost_by_group == {(2, "state"): 24}
    assert audit.reasons[Reason.NOT_SERVABLE] == 24


def test_what_an_engine_leaves_is_not_reused(tmp_path: Path) -> None:
    """Up to where all groups have it, an engine could have taken it."""
    parts = Engine(tmp_path / "log").parts("b", [0])
    assert [(each.reason, each.first_block, each.last_block) for each in parts[:3]] == [
        (Reason.PRIMARY, 0, 0),
        (Reason.NOT_REUSED, 1, 1),
        (Reason.NOT_SERVABLE, 2, 5),
    ]


def test_the_last_block_of_a_hit_is_computed_again(tmp_path: Path) -> None:
    """With EAGLE: what would have been the last block of the hit is, and a group is blamed for those before."""
    engine = Engine(tmp_path / "log", drops_last_hit=True)
    engine.recorder.admitted("c", PROMPT, [0, 1])
    engine.recorder.close()
    (found,) = explain_request(LogReader(engine.log), "c")
    reported = [(each.reason, each.first_block, each.last_block, each.group) for each in found.stays[0].parts]
    assert reported == [
        (Reason.PRIMARY, 0, 1, None),
        (Reason.NOT_SERVABLE, 2, 4, 1),
        (Reason.LAST_HIT, 5, 5, None),
        (Reason.LAST_TOKEN, 6, 6, None),
    ]


def test_the_moment_of_an_eviction(tmp_path: Path) -> None:
    """Of what is needed for the last block that full attention has."""
    engine = Engine(tmp_path / "log")
    reported = engine.recorder
    reported.admitted("c", PROMPT[:16])
    reported.evicted([5, 4], "c")  # full attention has 16 tokens left, and the window ends at 12
    reported.unnamed([9, 8], [KEYS[2], KEYS[1]], "c", group=1)
    reported.flush()
    parts = engine.parts("b", [0])
    lost = next(each for each in parts if each.reason == Reason.NOT_SERVABLE)
    assert (lost.group, lost.first_block, lost.last_block, lost.gone) == (1, 1, 3, None)


def test_commands_report_further_groups(tmp_path: Path, kvcache: Kvcache) -> None:
    """In words and in JSON; what cannot be told is refused with the reason."""
    engine = Engine(tmp_path / "log")
    engine.recorder.unnamed([11, 10], [KEYS[3], KEYS[1]], group=2)
    engine.recorder.flush()
    engine.parts("b", [])
    log = tmp_path / "log"
    said = kvcache("explain", log, "--request", "b").out
    assert "cached, but lost in group 2 (state)" in said
    assert "lost in group 2 (state): 24 tokens" in kvcache("audit", log).out
    part = json.loads(kvcache("explain", log, "--request", "b", "--json").out)["requests"][0]["stays"][0][
        "parts"
    ][0]
    assert (part["reason"], part["group"], part["group_kind"]) == ("not_servable", 2, "state")
    lost = json.loads(kvcache("audit", log, "--json").out)["lost_by_group"]
    assert lost == [{"group": 2, "kind": "state", "tokens": 24}]
    said = kvcache("replay", log, "--verify").out
    assert "group 1 (sliding): 0 blocks held, 3 named" in said
    sharing = json.loads(kvcache("replay", log, "--json").out)["sharing"]
    assert [(each["group"], each["named"]) for each in sharing] == [(1, 3), (2, 0)]
    said = kvcache("match", log, "--request", "a").out
    assert "0 tokens: group 2 (state) lacks what the following tokens need" in said
    assert "in group 1" in kvcache("who", log, "--slot", 8).out
    assert json.loads(kvcache("who", log, "--slot", 8, "--json").out)["groups"][0]["now"]["of_group"] == 1
    assert "layers of other kinds" in kvcache("whatif", log).err
    assert "full attention only" in kvcache("curve", log).out
    assert "agree" in kvcache("log", "verify", log).out or kvcache("log", "verify", log).code == 0
    for command in (
        ("events", log),
        ("diff", log, log),
        ("export", log, "-o", tmp_path / "t", "--to", "csv"),
    ):
        assert kvcache(*command).code == 0


def test_a_log_with_further_groups_is_not_played(tmp_path: Path) -> None:
    """It says why."""
    engine = Engine(tmp_path / "log")
    engine.recorder.close()
    with pytest.raises(UsageError, match="layers of other kinds"):
        list(recorded(tmp_path / "log"))


def test_an_epoch_begins_anew(tmp_path: Path) -> None:
    """What had a name before the process was started again is gone then."""
    Engine(tmp_path / "log").recorder.close()
    config = KVCacheConfig(tokens_per_block=SIZE, primary_blocks=16, max_sequence_length=64)
    groups = [LayerGroup("sliding", SIZE, 5, 1), LayerGroup("state", 2 * SIZE, 0, 3)]
    with (
        LogWriter(tmp_path / "log", resume=True) as log,
        Recorder(config, engine="toy", log=log, name_bytes=NAME_BYTES, groups=groups) as reported,
    ):
        reported.admitted("a", PROMPT)
        reported.allocated("a", range(7))
        reported.computed("a", len(PROMPT))
        reported.stored("a", 2, b"".join(KEYS[:2]))
        reported.flush()
        reported.admitted("b", PROMPT)
    (found,) = explain_request(LogReader(tmp_path / "log"), "b")
    lost = next(each for each in found.stays[0].parts if each.reason == Reason.NOT_SERVABLE)
    assert (lost.group, lost.first_block, lost.last_block) == (1, 0, 1)
    assert lost.gone is not None
    assert lost.gone_for is None
