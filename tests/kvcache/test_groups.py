"""Requests by tenant, session and label: against counts from the events alone, on random logs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from events import types as ev
from events.log import LogReader
from events.types import EventBatch, RequestId
from kvcache.audit.groups import MOMENTS, GroupTotals, Key, RequestGroups
from kvcache.audit.reasons import Reason
from kvcache.audit.tables import tables_of
from kvcache.audit.totals import Audit, audit_batches
from kvcache.audit.turns import SessionTurns, TurnKind, turns_of
from kvcache.errors import UsageError
from kvcache.manager import KVCacheManager
from tests.oracles.naive_audit import NaiveAudit
from tests.oracles.raw_log import RawLog
from tests.support.commands import run_log
from tests.support.engines import strategies
from tests.support.logs.agents import write_agents_trace
from tests.support.logs.random_logs import random_log, whole_part
from tests.support.seeds import seeds


def tenant_of(request_id: RequestId | None) -> str | None:
    """Any of three tenants, or none."""
    return None if request_id is None else (None, "acme", "zeta", "idle")[ord(str(request_id)[-1]) % 4]


def labelled(event: Any) -> Any:
    if not isinstance(event, ev.SequenceAdded) or (tenant := tenant_of(event.request_id)) is None:
        return event
    return replace(event, labels={"tenant": tenant})


def with_tenants(batches: Iterable[EventBatch]) -> list[EventBatch]:
    return [replace(batch, events=tuple(map(labelled, batch.events))) for batch in batches]


def audited(batches: Iterable[EventBatch], by: str = "tenant") -> tuple[Audit, RequestGroups]:
    groups = RequestGroups(by)
    return audit_batches(((batch, True) for batch in batches), others=[groups]), groups


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> list[EventBatch]:
    """The batches of a run of a made-up trace of agents."""
    directory = tmp_path_factory.mktemp("agents")
    write_agents_trace(directory / "trace.jsonl", 7)
    options = ("--primary-blocks", 60, "--secondary-blocks", 60, "--concurrency", 3)
    return list(LogReader(run_log(directory / "log", *options, trace=directory / "trace.jsonl")))


@pytest.mark.parametrize("seed", seeds(range(12), quick=3))
def test_groups_add_up_to_the_audit_and_agree_with_the_oracle(seed: int, tmp_path: Path) -> None:
    """Requests, prompt tokens by reason, and what was computed again because of whom: branches and restarts, too."""
    batches = with_tenants(LogReader(random_log(seed, tmp_path, branches=seed % 2 == 1)))
    audit, groups = audited(batches)
    totals = groups.totals.values()
    assert sum(each.requests for each in totals) == audit.requests
    assert (np.sum([each.reasons for each in totals], axis=0) == audit.reasons).all()
    assert groups.recomputed_tokens.total() == audit.lost_by_priority.total()
    judge = NaiveAudit()
    expected: dict[Key, Counter[str]] = {}
    for admission in (each for batch in batches for each in judge.batch(batch)):
        expected.setdefault(tenant_of(admission.request_id), Counter()).update(admission.sums)
    assert {key: by_reason(each) for key, each in groups.totals.items()} == expected
    again = Counter[Key]()
    for key, sums in expected.items():
        again[key] += sum(sums[reason] for reason in ("computing_again", "evicted", "dropped"))
    assert +again == +summed(groups.recomputed_tokens, 0)
    if judge.knows_all:
        charged = Counter[Key]()
        for (_, gone), tokens in judge.charged.items():
            charged[tenant_of(gone.for_request)] += tokens
        assert +charged == +summed(groups.recomputed_tokens, 1)


def by_reason(totals: GroupTotals) -> Counter[str]:
    return +Counter({reason.label: int(totals.reasons[reason]) for reason in Reason})


def summed(pairs: Counter[tuple[Key, Key]], end: int) -> Counter[Key]:
    """Over the other group of each pair."""
    sums = Counter[Key]()
    for pair, number in pairs.items():
        sums[pair[end]] += number
    return sums


class Evictions(RawLog):
    """Whose blocks were removed for whom, by slots and handles."""

    def __init__(self, batches: Iterable[EventBatch]) -> None:
        self.pairs = Counter[tuple[Key, Key]]()
        super().__init__(batches)

    def on_BlocksRemoved(self, event: ev.BlocksRemoved, seq: int) -> None:  # noqa: N802
        request = None if event.handle is None else self.requests[event.handle]
        runs = request is not None and request["ended"] is None
        before = len(self.lives)
        super().on_BlocksRemoved(event, seq)
        for life in self.lives[before:]:
            if life["full"]:
                needed_by = tenant_of(request["id"]) if request is not None and runs else None
                self.pairs[tenant_of(life["by"]), needed_by] += 1


@pytest.mark.parametrize("seed", seeds(range(16), quick=4))
def test_evictions_are_those_of_slots(seed: int, tmp_path: Path) -> None:
    """Of each full block that was removed, who had stored it and who needed the room."""
    batches = with_tenants(whole_part(LogReader(random_log(seed, tmp_path))))
    assert audited(batches)[1].evicted_blocks == Evictions(batches).pairs


@pytest.mark.parametrize("seed", seeds(range(12), quick=3))
def test_shares_are_those_of_the_blocks_that_live(seed: int, tmp_path: Path) -> None:
    """At each moment that is kept, of each tenant's blocks those that were stored before, and not gone yet."""
    batches = with_tenants(LogReader(random_log(seed, tmp_path)))
    _, groups = audited(batches)
    rows = [(name, row) for name, some in tables_of(batches, "blocks", "requests") for row in some]
    lives = [row for name, row in rows if name == "blocks"]
    # Of what ran before batches were lost nobody knows whose it is.
    tenants: dict[int | None, Key] = {
        row.admission: (row.labels or {}).get("tenant") for name, row in rows if name == "requests"
    }
    assert 1 < len(groups.moments) <= MOMENTS
    for moment in groups.moments:
        alive = Counter(
            tenants.get(row.stored_by_admission)
            for row in lives
            if row.stored_seq <= moment.batch and (row.gone_seq is None or row.gone_seq > moment.batch)
        )
        assert alive == moment.blocks


def test_what_is_before_counts_for_nothing_but_is_known(agents: list[EventBatch]) -> None:
    """Of two parts of a log the counts add up to those of the whole."""
    whole, parts = RequestGroups("tenant"), [RequestGroups("tenant"), RequestGroups("tenant")]
    turns = [SessionTurns() for _ in range(3)]
    middle = len(agents) // 2
    audit_batches(((batch, True) for batch in agents), others=[whole, turns[0]])
    audit_batches(((batch, True) for batch in agents[:middle]), others=[parts[0], turns[1]])
    later = ((batch, at >= middle) for at, batch in enumerate(agents))
    audit_batches(later, others=[parts[1], turns[2]])
    assert parts[0].evicted_blocks + parts[1].evicted_blocks == whole.evicted_blocks
    assert parts[0].recomputed_tokens + parts[1].recomputed_tokens == whole.recomputed_tokens
    for key, totals in whole.totals.items():
        assert sum(by_reason(each.totals[key]).total() for each in parts if key in each.totals) == int(
            totals.reasons.sum()
        )
    for kind, totals in turns[0].by_kind.items():
        assert totals.requests == sum(each.by_kind[kind].requests for each in turns[1:])


def test_dimensions(tmp_path: Path) -> None:
    """What each of them is of a request; where it has none, and of a branch that of its parent."""
    config = strategies.config(primary_blocks=32, model="m")
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        manager.add_sequence("a", [1, 2, 3], lora_id=7, labels={"tenant": "t", "model": "other"}, session="s")
        manager.add_sequence("b", [1, 2, 3], lora_id=7, lora_name="poet", cache_salt="x")
        manager.add_sequence("c", [1, 2, 3])
    batches = list(LogReader(tmp_path / "log"))

    def keys(by: str) -> set[Key]:
        return set(audited(batches, by)[1].totals)

    assert keys("session") == {"s", None}
    assert keys("tenant") == keys("label:tenant") == {"t", None}
    assert keys("model") == {"other", "m"}
    assert keys("lora") == {"7", "poet", None}
    assert {len(key or "") for key in keys("salt")} == {64, 0}
    assert keys("label:session") == {None}
    for by in ("", "label:", "agent", "Tenant"):
        with pytest.raises(UsageError, match="one of session, tenant, lora, salt, model, label:NAME"):
            RequestGroups(by)


class Chain:
    """A session's last turn with an agent, by its tokens alone."""

    def __init__(self, event: ev.SequenceAdded) -> None:
        self.event, self.tokens = event, array("i", event.tokens)

    def kind(self, before: Chain | None, size: int) -> str:
        if before is None:
            return "first"
        prompt, old = array("i", self.event.tokens), array("i", before.event.tokens)
        first = 0  # of the first full block before a last token that is not in both
        while (
            first + size < min(len(prompt), len(old))
            and prompt[first : first + size] == old[first : first + size]
        ):
            first += size
        if first + size > len(old) - min(512, len(old) // 8):
            return "extends"
        return "compaction" if len(prompt) < len(old) else "diverges"


def naive_turns(batches: list[EventBatch], size: int) -> dict[str, list[tuple[Any, ...]]]:
    """Of each session its turns: request, kind, and the first token that differs."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    chains: dict[Any, Chain] = {}
    running: dict[int, Chain] = {}
    for event in (each for batch in batches for each in batch.events):
        if isinstance(event, ev.TokensAppended):
            assert not event.counts
            for handle, token in zip(array("q", event.handles), array("i", event.tokens), strict=True):
                running[handle].tokens.append(token)
        if isinstance(event, ev.SequenceAdded):
            now = running[event.handle] = Chain(event)
            if event.session is None:
                continue
            before = chains.get(place := (event.session, (event.labels or {}).get("agent")))
            pairs = [] if before is None else list(zip(now.tokens, before.tokens, strict=False))
            differs = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            turn = (event.request_id, now.kind(before, size), differs)
            found.setdefault(event.session, []).append(turn)
            chains[place] = now
    return found


def test_turns_are_those_of_the_tokens(agents: list[EventBatch]) -> None:
    """Of each session, turn by turn: the first token that differs from the prompt before and what that generated."""
    naive = naive_turns(agents, 16)
    for session, turns in naive.items():
        found = turns_of(agents, session)
        assert [(each.admission.request_id, each.kind, each.differs_at) for each in found] == turns
        assert [each.number for each in found] == list(range(1, len(found) + 1))
        for each in found:
            assert each.block == (None if each.differs_at is None else each.differs_at // 16)
            beyond = each.differs_at is not None and each.differs_at >= (each.before_tokens or 0)
            assert each.differs_in_output == beyond
    counts = Counter(kind for turns in naive.values() for _, kind, _ in turns)
    assert set(counts) == {"first", "extends", "diverges", "compaction"}
    everything = SessionTurns()
    audit_batches(((batch, True) for batch in agents), others=[everything])
    assert {str(kind): each.requests for kind, each in everything.by_kind.items()} == counts
    assert not everything.turns


def test_turns_that_run_go_on_or_have_another_namespace(tmp_path: Path) -> None:
    """What a running turn has generated by then is compared; a preempted one goes on as the same turn."""
    with KVCacheManager(
        strategies.config(primary_blocks=64, tokens_per_block=4), log=tmp_path / "log"
    ) as manager:

        def add(name: str, tokens: list[int], **more: Any) -> None:
            manager.add_sequence(name, tokens, session="s", **more)

        prompt = list(range(10, 19))
        add("a", prompt)
        for token in (50, 51, 52):
            manager.add_tokens(["a"], [token])
        add("b", [*prompt, 50, 51, 7, 8])  # while "a" runs
        add("other", prompt, cache_salt="x")
        manager.remove_sequence("a")
        manager.remove_sequence("b")
        add("b", [*prompt, 50, 51, 7, 8, 9], resumed=True)
        manager.add_tokens(["b"], [60])
        manager.remove_sequence("b")
        add("c", [*prompt, 50, 51, 7, 8, 9, 60])
        add("d", prompt[:5])
    found = turns_of(LogReader(tmp_path / "log"), "s")
    reported = [
        (each.number, each.admission.request_id, str(each.kind), each.before, each.common_tokens)
        for each in found
    ]
    assert reported == [
        (1, "a", "first", None, None),
        (2, "b", "extends", "a", 11),
        (3, "other", "first", None, None),
        (3, "b", "resumed", "b", 13),
        (4, "c", "extends", "b", 15),
        (5, "d", "compaction", "c", 5),
    ]
    assert [each.differs_at for each in found] == [None, 11, None, None, None, None]
    assert found[4].before_tokens == 13
    with pytest.raises(UsageError, match=r"no request of session .t. was admitted"):
        turns_of(LogReader(tmp_path / "log"), "t")


def test_a_log_without_tokens_knows_groups_but_no_turns(tmp_path: Path) -> None:
    """Of those the first alone is known."""
    config = strategies.config(log={"record_tokens": False})
    with KVCacheManager(config, log=tmp_path / "log") as manager:
        for name in "ab":
            manager.add_sequence(name, [1, 2, 3, 4, 5], session="s")
            manager.remove_sequence(name)
    found = turns_of(LogReader(tmp_path / "log"), "s")
    assert [(each.kind, each.common_tokens) for each in found] == [
        (TurnKind.FIRST, None),
        (TurnKind.UNKNOWN, None),
    ]
    assert audited(LogReader(tmp_path / "log"), "session")[1].totals["s"].requests == 2
