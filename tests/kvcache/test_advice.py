"""Advice on workloads that are made to need it, and on the same ones without the need; each number is counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import SequenceAdded
from kvcache.audit.advice import Advice, Observed, TooFewRequests, advise, observe_log, observe_trace
from kvcache.workload.traces import TracePrompts
from tests.oracles.eviction_models import Gap, Model, Prompt, Ranked, Segmented, Tail, TwoQueues
from tests.support.logs.served import (
    SIZE,
    Asked,
    Texts,
    round_robin,
    serve,
    two_tenants,
    with_a_date,
    with_a_system_prompt,
    with_an_id,
    write_trace,
)


class Reported:
    """What is said of some requests, and what lists of tokens say of them."""

    def __init__(
        self, tmp_path: Path, requests: Iterable[Asked], *, timeout: float = 300, **how: Any
    ) -> None:
        self.requests = list(requests)
        self.log = serve(tmp_path / "log", self.requests, **how)
        self.found = observe_log(self.log)
        advised = advise(self.found, timeout)
        self.of: dict[str, Advice] = {each.topic: each for each in advised.advice}
        self.left_out = {each.topic: each for each in advised.left_out}
        assert len(self.of) + len(self.left_out) == 9
        self.tokens = sum(len(asked.tokens) for asked in self.requests)
        assert self.found.prompt_tokens == self.tokens

    @property
    def worth(self) -> set[str]:
        return {topic for topic, advice in self.of.items() if advice.worth}

    def lost(self) -> list[int]:
        """By request: what it has of earlier prompts, and did not reuse, since nothing but evictions takes it away."""
        events = [event for batch in LogReader(self.log) for event in batch.events]
        reused = [event.reused for event in events if isinstance(event, SequenceAdded)]
        return [there - taken for there, taken in zip(seen_before(self.requests), reused, strict=True)]


def blocks_of(asked: Asked) -> list[tuple[object, ...]]:
    """The full blocks before the last token, by all that they stand for."""
    return [(asked.tenant, *asked.tokens[:end]) for end in range(SIZE, len(asked.tokens), SIZE)]


def seen_before(requests: Sequence[Asked]) -> list[int]:
    """Tokens of each request that begin an earlier one, in full blocks."""
    seen, tokens = set[tuple[object, ...]](), []
    for asked in requests:
        blocks = blocks_of(asked)
        tokens.append(SIZE * sum(block in seen for block in blocks))
        seen.update(blocks)
    return tokens


def lru(requests: Sequence[Asked], size: int) -> int:
    """Tokens that are reused one by one in a cache of so many blocks; of a prompt the last block goes first."""
    used, reused = dict[tuple[object, ...], tuple[int, int]](), 0
    for now, asked in enumerate(requests):
        blocks = blocks_of(asked)
        missing = [at for at, block in enumerate(blocks) if block not in used]
        reused += missing[0] if missing else len(blocks)
        used |= {block: (now, -at) for at, block in enumerate(blocks[:size])}
        for block in sorted(used, key=used.__getitem__)[: max(len(used) - size, 0)]:
            del used[block]
    return reused * SIZE


def with_timeout(requests: Sequence[Asked], timeout: float) -> int:
    """Tokens that are reused if blocks are dropped that were idle for longer."""
    used, reused, now = dict[tuple[object, ...], float](), 0, 0.0
    for asked in requests:
        now += asked.seconds
        blocks = blocks_of(asked)
        gone = [at for at, block in enumerate(blocks) if now - used.get(block, -1e18) > timeout]
        reused += gone[0] if gone else len(blocks)
        used |= dict.fromkeys(blocks, now)
    return reused * SIZE


class TestVolatile:
    """An id, or a date, at the beginning of a system prompt."""

    def test_an_id(self, tmp_path: Path) -> None:
        """It is found, and the same prompts with it at their ends reuse as much as is said."""
        reported, last = (
            Reported(tmp_path / name, with_an_id(150, first=first), primary_blocks=8000)
            for name, first in (("first", True), ("last", False))
        )
        advice = reported.of["volatile"]
        assert advice.worth
        assert advice.saved_tokens == lru(last.requests, 10**6) - lru(reported.requests, 10**6)
        about = advice.about
        assert (about["requests"], about["position"], about["values"]) == (150, 38, 150)
        assert (about["shortest"], about["longest"], about["alike_tokens"]) == (12, 14, 600)
        assert about["compared_tokens"] == 1
        assert not last.of["volatile"].worth
        assert last.of["volatile"].about["requests"] == 0
        assert "size" in reported.left_out

    @pytest.mark.parametrize(("days", "worth"), [(6, True), (2, False)])
    def test_a_date(self, tmp_path: Path, days: int, *, worth: bool) -> None:
        """Each day is one miss: many of them are worth it, and one is not."""
        reported = Reported(tmp_path, with_a_date(180, days), primary_blocks=8000)
        advice = reported.of["volatile"]
        assert advice.worth is worth
        assert advice.about["values"] == days
        assert advice.saved_tokens == (days - 1) * (605 // SIZE) * SIZE

    def test_prompts_of_a_trace(self, tmp_path: Path) -> None:
        """With tokens the same is found as in a log; with numbers for blocks what they tell of blocks."""
        requests = list(with_an_id(150))
        trace = write_trace(tmp_path / "trace", requests)
        found = observe_trace("trace", lambda: TracePrompts(trace, tokens_per_block=SIZE), None)
        assert found.volatile is not None
        log = Reported(tmp_path, requests, primary_blocks=8000).of["volatile"]
        [advice] = [each for each in advise(found, 300).advice if each.topic == "volatile"]
        assert advice == log


class TestSize:
    """Documents that come again in turn, in caches with and without room for them."""

    def test_too_small(self, tmp_path: Path) -> None:
        """The knee has room for all; more primary and a host tier save what a cache of that size reuses."""
        reported = Reported(tmp_path, round_robin(400, 20), primary_blocks=100)
        assert {"size", "primary", "host"} <= reported.worth
        size, now = reported.of["size"], lru(reported.requests, 100)
        assert size.about["verdict"] == "larger"
        assert (size.about["knee_blocks"], size.about["blocks"]) == (200, 100)
        for topic, blocks in (("size", 200), ("primary", 200), ("host", 200)):
            assert reported.of[topic].saved_tokens == lru(reported.requests, blocks) - now > 0
        assert (reported.of["primary"].about["blocks"], reported.of["host"].about) == (
            200,
            {"blocks": 100, "blocks_now": 0},
        )
        asked = sum(len(blocks_of(each)) for each in reported.requests) * SIZE
        assert size.about["hit_rate"] == now / asked
        assert size.about["knee_hit_rate"] == lru(reported.requests, 200) / asked
        assert sum(reported.lost()) >= 0.01 * reported.tokens
        assert reported.found.losses is not None
        assert reported.found.losses.lost_tokens == sum(reported.lost())

    def test_what_is_said_is_what_happens(self, tmp_path: Path) -> None:
        """In a cache of the size that is advised, nearly as much more is reused."""
        reported = Reported(tmp_path / "small", round_robin(400, 20), primary_blocks=100)
        large = Reported(tmp_path / "large", round_robin(400, 20), primary_blocks=200 + 11)
        assert reported.found.losses is not None
        assert large.found.losses is not None
        more = large.found.losses.reused_tokens - reported.found.losses.reused_tokens
        assert more == reported.of["size"].saved_tokens

    def test_large_enough(self, tmp_path: Path) -> None:
        """A tenth of the requests is never asked for again, and fills what is left: evictions cost nothing."""
        requests = [
            once if number % 10 == 0 else again
            for number, (once, again) in enumerate(
                zip(with_a_system_prompt(400, every=1000), round_robin(400, 10), strict=True)
            )
        ]
        reported = Reported(tmp_path, requests, primary_blocks=150)
        assert not {"size", "primary", "host"} & reported.worth
        assert reported.of["size"].about["verdict"] == "enough"
        assert sum(reported.lost()) == 0

    def test_larger_than_need_be(self, tmp_path: Path) -> None:
        """Half of it would do, and nothing would be lost."""
        reported = Reported(tmp_path, round_robin(400, 10), primary_blocks=300)
        assert reported.of["size"].about["verdict"] == "smaller"
        assert reported.of["size"].worth
        assert reported.of["size"].saved_tokens == 0
        assert lru(reported.requests, 100) == lru(reported.requests, 300)

    def test_a_host_tier_that_is_there(self, tmp_path: Path) -> None:
        """With room for all of it nothing is advised."""
        reported = Reported(tmp_path, round_robin(400, 20), primary_blocks=100, secondary_blocks=140)
        assert not {"size", "primary", "host"} & reported.worth
        assert reported.of["host"].about == {"blocks": 140, "blocks_now": 140}


class TestPolicy:
    """Orders of eviction other than LRU, beside models with lists."""

    @pytest.mark.timeout(600)  # where the compiler has to be waited for
    @pytest.mark.parametrize(("flood", "worth"), [(60, True), (2, False)])
    def test_the_best_one(self, tmp_path: Path, flood: int, *, worth: bool) -> None:
        """Documents that are asked for again go with LRU where much comes once between them, and not with others."""
        reported = Reported(tmp_path, two_tenants(300, flood=flood), primary_blocks=100)
        advice = reported.of["policy"]
        assert advice.worth is worth
        numbers = dict[tuple[object, ...], int]()
        prompts, now = list[Prompt](), 0.0
        for asked in reported.requests:
            now += asked.seconds
            blocks = [numbers.setdefault(block, len(numbers)) for block in blocks_of(asked)]
            prompts.append(Prompt(blocks, now, 0.0, None))
        models: dict[str, Model] = {
            "fifo": Model(prompts, 100),
            "lfu": Ranked(prompts, 100, lambda depth: 1.0),
            "gdsf": Ranked(prompts, 100, lambda depth: 1 + depth * SIZE / 32768),
            "slru": Segmented(prompts, 100, 80),
            "s3fifo": TwoQueues(prompts, 100, 10),
            "tlru": Tail(prompts, 100, 4096 // SIZE),
            "gap": Gap(prompts, 100, 20),
        }
        hits = {name: sum(model.play()) for name, model in models.items()}
        usual, block_requests = (
            lru(reported.requests, 100) // SIZE,
            sum(map(len, map(blocks_of, reported.requests))),
        )
        assert hits[advice.about["policy"]] == max(hits.values())
        assert advice.about["hit_rate"] == max(hits.values()) / block_requests
        assert advice.about["lru_hit_rate"] == usual / block_requests
        better = max(hits.values()) - usual
        assert (better >= 0.02 * block_requests) is worth
        assert advice.saved_tokens == (better * SIZE if worth else 0)

    def test_without_a_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would take minutes, so what is missing is said instead."""
        monkeypatch.setattr("kvcache.audit.advice.COMPILED", False)
        reported = Reported(tmp_path, round_robin(400, 20), primary_blocks=100)
        assert "pip install 'kvcache[simulate]'" in reported.left_out["policy"].reason


class TestTimeout:
    """Documents that are asked for every ten minutes, or every ten seconds."""

    @pytest.mark.parametrize(("seconds", "worth"), [(60.0, True), (1.0, False)])
    def test_both(self, tmp_path: Path, seconds: float, *, worth: bool) -> None:
        """A timeout of five minutes loses what a cache loses that drops blocks then."""
        reported = Reported(tmp_path, round_robin(640, 10, seconds=seconds), primary_blocks=60)
        advice = reported.of["ttl"]
        assert advice.worth is worth
        lost = with_timeout(reported.requests, 10**9) - with_timeout(reported.requests, 300)
        assert advice.about["lost_tokens"] == lost
        assert advice.saved_tokens == (lost if worth else 0)
        enough = advice.about["enough_seconds"]
        assert (
            with_timeout(reported.requests, enough)
            > with_timeout(reported.requests, 10**9) - 0.01 * reported.tokens
        )
        assert enough == (600 if worth else 10)

    def test_log_is_shorter(self, tmp_path: Path) -> None:
        """Twice the timeout is needed."""
        left_out = Reported(tmp_path, round_robin(400, 10), primary_blocks=60).left_out["ttl"]
        assert left_out.needed_seconds == 600
        assert "too short for a timeout of 5 min" in left_out.reason


class TestPin:
    """A system prompt that goes between two requests for it, or stays."""

    def test_it_goes(self, tmp_path: Path) -> None:
        """What evictions cost of it is what is said, and who has it."""
        reported = Reported(tmp_path, with_a_system_prompt(300, every=6), primary_blocks=80)
        advice = reported.of["pin"]
        assert advice.worth
        system = reported.requests[0].tokens[: SIZE * 8]
        having = [
            number for number, asked in enumerate(reported.requests) if asked.tokens[: SIZE * 8] == system
        ]
        # What the others have of earlier prompts is nothing.
        assert advice.saved_tokens == advice.about["lost_tokens"] == sum(reported.lost()) == 49 * SIZE * 8
        assert (advice.about["requests"], advice.about["prefix_tokens"]) == (len(having), SIZE * 8)
        assert advice.about["asked_tokens"] == len(having) * SIZE * 8
        assert (advice.about["request_id"], advice.about["primary_share"]) == (0, 0.1)

    def test_it_stays(self, tmp_path: Path) -> None:
        """The same prompt, asked for so often that nothing of it goes."""
        reported = Reported(tmp_path, with_a_system_prompt(300, every=2), primary_blocks=80)
        assert not reported.of["pin"].worth
        assert reported.of["pin"].about["lost_tokens"] == sum(reported.lost()) == 0
        assert reported.of["pin"].about["requests"] == 150

    def test_it_is_too_long(self, tmp_path: Path) -> None:
        """What takes more than half of primary is not pinned."""
        reported = Reported(tmp_path, with_a_system_prompt(300, every=6, blocks=42), primary_blocks=80)
        assert reported.of["pin"].about["lost_tokens"] > 0.1 * reported.tokens
        assert not reported.of["pin"].worth

    def test_none_is_shared(self, tmp_path: Path) -> None:
        """Prompts that have nothing in common."""
        reported = Reported(tmp_path, with_a_system_prompt(300, every=1000), primary_blocks=80)
        assert reported.of["pin"].about == {"prefix_tokens": 0}


class TestRunning:
    """The same requests, many at a time and one at a time."""

    def test_they_fill_it(self, tmp_path: Path) -> None:
        """Eight with eleven blocks each hold nearly all of 95; half of them would leave half."""
        reported = Reported(tmp_path, round_robin(400, 20), primary_blocks=95, running=8)
        advice = reported.of["running"]
        assert advice.worth
        held = [11 * min(number + 1, 8) for number in range(400)]
        assert advice.about["most_held_blocks"] == max(held) == 88
        assert advice.about["held_blocks"] == round(sum(held) / 400)
        assert advice.about["running"] == sum(min(number + 1, 8) for number in range(400)) / 400
        assert advice.about["full"] == sum(each >= 0.9 * 95 for each in held) / 400
        assert advice.about["at_a_time"] == 4
        assert advice.about["lost_tokens"] == sum(reported.lost()) > 0
        assert next(iter(reported.of)) == "running"
        assert not reported.of["pin"].worth

    def test_they_do_not(self, tmp_path: Path) -> None:
        """One at a time loses as much, and it is not for this."""
        reported = Reported(tmp_path, round_robin(400, 20), primary_blocks=95)
        assert not reported.of["running"].worth
        assert sum(reported.lost()) > 0

    def test_nothing_is_lost(self, tmp_path: Path) -> None:
        """They fill the cache, and nobody asks for what goes."""
        reported = Reported(tmp_path, with_a_system_prompt(300, every=1000), primary_blocks=85, running=4)
        assert reported.of["running"].about["full"] > 0.9
        assert not reported.of["running"].worth


class TestTenant:
    """A tenant whose documents make room for another one's, which are never asked for again."""

    @pytest.mark.parametrize("label", [False, True])
    def test_it_suffers(self, tmp_path: Path, *, label: bool) -> None:
        """What each has lost is counted, and for whom it went; tenants have a salt each, or a label."""
        reported = Reported(tmp_path, two_tenants(300, flood=60, label=label), primary_blocks=100)
        advice = reported.of["tenant"]
        assert advice.worth
        by = Counter[bool]()
        asked = Counter[bool]()
        for number, lost in enumerate(reported.lost()):
            by[number % 2 == 0] += lost
            asked[number % 2 == 0] += len(reported.requests[number].tokens)
        about = advice.about
        assert about["lost_tokens"] == by[True] > 0
        assert about["prompt_tokens"] == asked[True]
        assert about["lost_rate"] == by[True] / asked[True]
        assert about["others_lost_rate"] == by[False] / asked[False] == 0
        assert about["requests"] == 150
        # Most of it made room for the long prompts, some for its own documents.
        assert 0.5 * by[True] < about["lost_to_others_tokens"] == advice.saved_tokens <= by[True]
        assert (about["tenant"] == "quiet") is label
        assert (about["taker"] == "loud") is label
        assert about["taker"].startswith("loud" if label else "salt ")

    def test_it_does_not(self, tmp_path: Path) -> None:
        """Where the other one asks for little, nothing goes."""
        reported = Reported(tmp_path, two_tenants(300, flood=2), primary_blocks=100)
        assert not reported.of["tenant"].worth
        assert reported.of["tenant"].about["lost_tokens"] == 0

    def test_all_suffer_alike(self, tmp_path: Path) -> None:
        """Two that ask for the same kind of documents in turn take room from each other."""
        requests = [
            asked._replace(tenant="a" if number // 20 % 2 else "b")
            for number, asked in enumerate(round_robin(400, 20))
        ]
        reported = Reported(tmp_path, requests, primary_blocks=100)
        assert reported.of["tenant"].about["lost_tokens"] > 0
        assert not reported.of["tenant"].worth

    def test_there_is_one(self, tmp_path: Path) -> None:
        """Nobody to compare with."""
        reported = Reported(tmp_path, round_robin(200, 20), primary_blocks=100)
        assert reported.of["tenant"].about == {"tenants": 1, "by": "lora"}

    @pytest.mark.parametrize("by", ["tenant", "model"])
    def test_who_loses_the_largest_part(self, tmp_path: Path, by: str) -> None:
        """Not who loses most tokens: of three, the largest one also asks for what is new. Salts are not looked at."""
        texts = Texts(7)
        lines = round_robin(300, 20)
        names = [("small", "middle", "large", "large")[number % 4] for number in range(300)]
        requests = [
            asked._replace(
                tokens=texts.fresh(len(asked.tokens)) if number % 8 == 3 else asked.tokens,
                label=name if by == "tenant" else None,
                model=name if by == "model" else None,
            )
            for number, (asked, name) in enumerate(zip(lines, names, strict=True))
        ]
        reported = Reported(tmp_path, requests, primary_blocks=100)
        lost, asked = Counter[str](), Counter[str]()
        for name, request, tokens in zip(names, requests, reported.lost(), strict=True):
            lost[name] += tokens
            asked[name] += len(request.tokens)
        parts = {name: lost[name] / asked[name] for name in lost}
        assert max(lost, key=lost.__getitem__) == "large" == min(parts, key=parts.__getitem__)
        about = reported.of["tenant"].about
        assert (about["tenant"], about["by"]) == (max(parts, key=parts.__getitem__), by)
        assert about["lost_rate"] == max(parts.values()) > about["others_lost_rate"]


class TestTooShort:
    """What is left out, and how long a log should be."""

    def test_few_requests(self, tmp_path: Path) -> None:
        """Nothing is said, but how many it takes."""
        with pytest.raises(
            TooFewRequests, match=r"has only 40 requests in 39 s; .* at least 100: 98 s at this rate"
        ):
            Reported(tmp_path, round_robin(40, 5), primary_blocks=20)

    def test_never_full(self, tmp_path: Path) -> None:
        """What evictions would do is not known; of a cache with half the blocks it is."""
        reported = Reported(tmp_path, round_robin(400, 10), primary_blocks=300)
        assert set(reported.left_out) == {"primary", "host", "policy", "pin", "running", "tenant", "ttl"}
        assert "101 of 300 blocks were in use at most" in reported.left_out["pin"].reason
        assert reported.left_out["pin"].needed_seconds == pytest.approx(399 * 300 / 101)
        assert "pin" in Reported(tmp_path / "full", round_robin(400, 10), primary_blocks=90).of

    def test_reuse_is_not_covered(self, tmp_path: Path) -> None:
        """Where things come again after most of the log, they may come again after its end, too."""
        reported = Reported(tmp_path, round_robin(180, 100), primary_blocks=90)
        assert {"size", "primary", "host"} <= set(reported.left_out)
        assert "5.0 % of the reuses come after 100 s or more" in reported.left_out["size"].reason
        assert reported.left_out["size"].needed_seconds == 400
        assert "size" in Reported(tmp_path / "long", round_robin(500, 100), primary_blocks=90).of

    def test_nothing_is_reused(self, tmp_path: Path) -> None:
        """No curve without reuse."""
        reported = Reported(tmp_path, with_a_system_prompt(120, every=1000), primary_blocks=80)
        assert "no block was requested twice in 119 s" in reported.left_out["size"].reason


def of_trace(path: Path, **how: Any) -> Observed:
    return observe_trace("trace", lambda: TracePrompts(path, tokens_per_block=SIZE, **how), None)


def test_a_trace_alone(tmp_path: Path) -> None:
    """Without a cache there is the knee, the timeout, the prefix and what differs; the rest says what it needs."""
    requests = list(round_robin(640, 10))
    advised = advise(of_trace(write_trace(tmp_path / "trace", requests)), 300)
    of = {each.topic: each for each in advised.advice}
    assert set(of) == {"volatile", "size", "ttl", "pin"}
    log = Reported(tmp_path, requests, primary_blocks=90)
    assert of["size"].about["verdict"] == "unknown"
    assert of["size"].about["knee_blocks"] == log.of["size"].about["knee_blocks"] == 100
    assert of["ttl"] == log.of["ttl"]
    asked = ("prefix_tokens", "requests", "asked_tokens", "request_id")
    assert {name: of["pin"].about[name] for name in asked} == {
        name: log.of["pin"].about[name] for name in asked
    }
    assert {each.topic for each in advised.left_out} == {"primary", "host", "policy", "running", "tenant"}
    assert all("--primary-blocks" in each.reason for each in advised.left_out)
