"""Beside SGLang's own scheduler the recorder knows, after each step, exactly what SGLang's prefix cache holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Kvcache
from tests.support.engines.in_vllm import SECONDS, plugins, reported, run_where
from tests.support.seeds import day, one_a_day

PYTHON_TREE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
RELEASES = {"SGLANG_OPT_RELEASE_PREFILL_SWA": "1"}
CHUNKED = {"chunked_prefill_size": 64}
AHEAD = {"disable_overlap_schedule": False}
SLIDING = {"model": "sliding", "swa_full_tokens_ratio": 0.5}
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 1.5, "hicache_io_backend": "direct"}
pytestmark = [pytest.mark.needs("sglang"), pytest.mark.timeout(SECONDS)]


@pytest.mark.parametrize(
    ("settings", "env"),
    one_a_day(
        [
            pytest.param({"page_size": 16, **CHUNKED, **AHEAD}, RETRACTIONS, id="16"),
            pytest.param({"page_size": 1, **AHEAD}, {}, id="1"),
            pytest.param({"page_size": 1, **CHUNKED}, RETRACTIONS | PYTHON_TREE, id="1-python"),
            pytest.param({"page_size": 16}, PYTHON_TREE, id="16-python"),
            pytest.param({"page_size": 1, **CHUNKED, **HOST}, {}, id="1-host"),
            pytest.param(
                {"page_size": 16, **AHEAD, **HOST, "hicache_write_policy": "write_back"},
                {},
                id="16-write-back",
            ),
            pytest.param({"page_size": 4, "enable_mixed_chunk": True, **CHUNKED}, {}, id="4-mixed"),
            pytest.param(
                {"page_size": 16, **SLIDING, **CHUNKED, **AHEAD}, RETRACTIONS | RELEASES, id="16-sliding"
            ),
            pytest.param(
                {"page_size": 1, **SLIDING, **CHUNKED}, PYTHON_TREE | RELEASES, id="1-sliding-python"
            ),
            pytest.param({"page_size": 4, **SLIDING}, RETRACTIONS | PYTHON_TREE, id="4-sliding-python"),
        ]
    ),
)
def test_the_mirror_is_what_sglang_has(
    settings: dict[str, Any], env: dict[str, str], tmp_path: Path, kvcache: Kvcache
) -> None:
    """Random programs: pages, contents, tables, tokens and hits are SGLang's, and the log is good for all."""
    log = tmp_path / "log"
    arguments = (log, day(), json.dumps(settings))
    seen = reported(
        run_where(
            "sglang",
            "tests.support.engines.sglang_programs",
            *arguments,
            path=plugins(tmp_path / "plugins"),
            **env,
        )
    )
    least = ["admitted", "reused", "aborted", "BlocksReused", "BlocksRemoved", "AdmissionRefused"]
    if env.keys() & RETRACTIONS.keys():
        least.append("preempted")
    if HOST.keys() & settings.keys():
        least.append("BlocksMoved")
    if SLIDING.keys() <= settings.keys():
        least += ["SlotsTaken", "SlotsLeft", "SlotsNamed", "SlotsUnnamed", "exchanged"]
    assert all(seen.get(name) for name in least), seen
    assert seen["admitted"] > 100
    further = {
        "report": ("-o", tmp_path / "page.html"),
        "replay": ("--verify",),
        "explain": ("--request", "r20."),
        "match": ("--request", "r20."),
    }
    outputs = {}
    for command in ("audit", "explain", "curve", "whatif", "report", "replay", "match"):
        done = kvcache(command, log, *further.get(command, ()))
        refused = command == "whatif" and SLIDING.keys() <= settings.keys()
        assert done.code == (2 if refused else 0), (command, done)
        outputs[command] = done.out
    assert "decided by     sglang 0.5.23" in outputs["audit"]
    if SLIDING.keys() <= settings.keys():
        assert "lost in group 1 (sliding)" in outputs["audit"]
    assert "prompt tokens, admitted in batch" in outputs["explain"]


def test_nothing_of_ours_is_loaded_without_a_setting(tmp_path: Path) -> None:
    """The plugin is installed and no variable set: no hook is asked for, and nothing else is loaded."""
    path = plugins(tmp_path / "plugins")
    done = run_where("sglang", "tests.support.engines.sglang_loaded", tmp_path / "engine", path=path)
    assert reported(done) == [
        "kvcache",
        "kvcache._version",
        "kvcache.integrations",
        "kvcache.integrations.sglang",
        "kvcache.integrations.sglang.plugin",
    ]
