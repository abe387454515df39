"""The generator of chat traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import sha256
from itertools import pairwise

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.workload import chats
from kvcache.workload.chats import generate_chats
from kvcache.workload.driver import DriveOptions, Engine
from kvcache.workload.traces import TraceRequest, read_trace
from tests.support.places import ROOT

SMALL_TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"


def conversations(requests: list[TraceRequest], system_blocks: int) -> list[list[TraceRequest]]:
    """Requests that share their first block after the system prompt."""
    found = defaultdict(list)
    for request in requests:
        found[request.hash_ids[system_blocks]].append(request)
    return list(found.values())


def test_equal_seeds_give_equal_requests_everywhere() -> None:
    """The requests of a seed are those that they have always been, so workloads agree between machines."""
    fields = ("timestamp", "input_length", "output_length", "hash_ids", "cache_salt")
    reported = [
        f"TraceRequest({', '.join(f'{name}={getattr(each, name)!r}' for name in fields)})"
        for each in generate_chats(16, seed=7)
    ]
    digest = sha256(f"[{', '.join(reported)}]".encode()).hexdigest()
    assert digest == "0699fa71779f10b4087b072d8b67fe63f0fedf71e78bf026aa83aab5a9ee769c"


def test_seed_changes_the_workload() -> None:
    """Another seed gives other requests."""
    assert generate_chats(5, seed=1) != generate_chats(5, seed=2)


def test_each_turn_repeats_the_earlier_ones() -> None:
    """Within a conversation prompts grow by question and answer, and each starts with all of the one before."""
    by_user = conversations(generate_chats(64), system_blocks=2)
    assert len(by_user) == 64
    for turns in by_user:
        assert chats.TURNS[0] <= len(turns) <= chats.TURNS[1]
        assert 40 <= turns[0].input_length - 1024 <= 400
        for earlier, later in pairwise(turns):
            assert later.timestamp >= earlier.timestamp
            assert 40 <= later.input_length - earlier.input_length - earlier.output_length <= 400
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids


def test_conversations_share_system_prompts_and_nothing_else() -> None:
    """Blocks after the system prompt belong to one conversation; the first system prompt is the most used."""
    by_user = conversations(generate_chats(200), system_blocks=2)
    owners = Counter(block for turns in by_user for block in {b for turn in turns for b in turn.hash_ids[2:]})
    assert set(owners.values()) == {1}
    systems = Counter(turns[0].hash_ids[:2] for turns in by_user)
    assert set(systems) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert systems.most_common(1)[0][0] == (0, 1)


def test_requests_come_by_time_and_users_take_turns() -> None:
    """Arrival times never fall, and other users come between the turns of one."""
    requests = generate_chats(64)
    times = [request.timestamp for request in requests]
    assert times == sorted(times)
    firsts = [request.hash_ids[2] for request in requests]
    assert sum(one == next_ for one, next_ in pairwise(firsts)) < len(firsts) / 10


def test_recorded_trace_is_small_and_complete() -> None:
    """The recorded file holds the turns of all sixteen conversations."""
    requests = list(read_trace(SMALL_TRACE))
    assert len(conversations(requests, system_blocks=1)) == 16
    assert 48 <= len(requests) <= 64


def test_recorded_trace_reuses_as_it_is_played_by_default() -> None:
    """The recorded file is longer than one admission of `kvcache run`, so later turns find the earlier ones."""
    requests = list(read_trace(SMALL_TRACE))
    config = KVCacheConfig(max_sequence_length=2048, primary_blocks=1024)
    manager = KVCacheManager(config)
    result = Engine(manager, requests).run()
    assert result.requests == len(requests) > DriveOptions().concurrency
    assert manager.stats().hit_rate > 0.3
