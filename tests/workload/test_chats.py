"""The generator of chat traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from kvcache import KVCacheConfig, KVCacheManager
from kvcache.errors import UsageError
from kvcache.workload import DriveOptions, drive
from kvcache.workload.chats import ChatOptions, generate_chats
from kvcache.workload.mooncake import TraceRequest, read_trace, write_trace
from tests.conftest import ROOT

SMALL = ChatOptions(
    seed=7,
    users=16,
    system_prompts=2,
    system_tokens=512,
    turns=(3, 4),
    question_tokens=(20, 120),
    answer_tokens=(5, 25),
    arrival_ms=50,
    think_ms=500,
)
SMALL_TRACE = ROOT / "tests" / "data" / "chats_small.jsonl"


def conversations(requests: list[TraceRequest], system_blocks: int) -> list[list[TraceRequest]]:
    """Requests that share their first block after the system prompt."""
    found = defaultdict(list)
    for request in requests:
        found[request.hash_ids[system_blocks]].append(request)
    return list(found.values())


def test_equal_options_give_the_recorded_trace(tmp_path: Path) -> None:
    """The generator writes the very bytes of the recorded file, so workloads agree between machines."""
    path = tmp_path / "trace.jsonl"
    write_trace(path, generate_chats(SMALL))
    assert path.read_bytes() == SMALL_TRACE.read_bytes()


def test_seed_changes_the_workload() -> None:
    """Another seed gives other requests."""
    assert generate_chats(ChatOptions(seed=1)) != generate_chats(ChatOptions(seed=2))


def test_each_turn_repeats_the_earlier_ones() -> None:
    """Within a conversation prompts grow by question and answer, and each starts with all of the one before."""
    options = ChatOptions()
    by_user = conversations(generate_chats(options), system_blocks=2)
    assert len(by_user) == options.users
    for turns in by_user:
        assert options.turns[0] <= len(turns) <= options.turns[1]
        assert 40 <= turns[0].input_length - options.system_tokens <= 400
        for earlier, later in pairwise(turns):
            assert later.timestamp >= earlier.timestamp
            assert 40 <= later.input_length - earlier.input_length - earlier.output_length <= 400
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids


def test_conversations_share_system_prompts_and_nothing_else() -> None:
    """Blocks after the system prompt belong to one conversation; the first system prompt is the most used."""
    options = ChatOptions(users=200)
    by_user = conversations(generate_chats(options), system_blocks=2)
    owners = Counter(block for turns in by_user for block in {b for turn in turns for b in turn.hash_ids[2:]})
    assert set(owners.values()) == {1}
    systems = Counter(turns[0].hash_ids[:2] for turns in by_user)
    assert set(systems) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert systems.most_common(1)[0][0] == (0, 1)


def test_requests_come_by_time_and_users_take_turns() -> None:
    """Arrival times never fall, and other users come between the turns of one."""
    requests = generate_chats(ChatOptions())
    times = [request.timestamp for request in requests]
    assert times == sorted(times)
    firsts = [request.hash_ids[2] for request in requests]
    assert sum(one == next_ for one, next_ in pairwise(firsts)) < len(firsts) / 10


def test_no_system_prompt() -> None:
    """Without system prompts conversations share nothing."""
    requests = generate_chats(ChatOptions(system_tokens=0, users=5))
    assert len(conversations(requests, system_blocks=0)) == 5


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("users", 0, "at least 1"),
        ("system_prompts", 0, "at least 1"),
        ("arrival_ms", 0, "at least 1"),
        ("think_ms", -1, "at least 1"),
        ("system_tokens", 100, "multiple of 512"),
        ("system_tokens", -512, "not be negative"),
        ("turns", (0, 3), "1 <= fewest <= most"),
        ("question_tokens", (5, 4), "1 <= fewest <= most"),
        ("answer_tokens", (0, 4), "1 <= fewest <= most"),
    ],
)
def test_impossible_sizes_are_refused(name: str, value: object, rule: str) -> None:
    """A size that makes no workload is refused by name, with what is accepted."""
    with pytest.raises(UsageError, match=f"chat option {name} .*{rule}"):
        ChatOptions(**{name: value})  # type: ignore[arg-type]


def test_recorded_trace_is_small_and_complete() -> None:
    """The recorded file holds the turns of all sixteen conversations."""
    requests = list(read_trace(SMALL_TRACE))
    assert len(conversations(requests, system_blocks=1)) == SMALL.users
    assert 48 <= len(requests) <= 64


def test_recorded_trace_reuses_as_it_is_played_by_default() -> None:
    """The recorded file is longer than one admission of `kvcache run`, so later turns find the earlier ones."""
    requests = list(read_trace(SMALL_TRACE))
    config = KVCacheConfig(max_sequence_length=2048, primary_blocks=1024)
    result = drive(KVCacheManager(config), requests, DriveOptions())
    assert result.requests == len(requests) > DriveOptions().concurrency
    assert result.hit_rate > 0.3
