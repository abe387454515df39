"""What commands say of torch, and of a run whose blocks have bytes; `tests/cli` has all else that they say."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.answers import assert_documented
from tests.support.commands import TRACE, Kvcache


def test_doctor_finds_torch(kvcache: Kvcache) -> None:
    """Its version and a device are there, and nothing is wrong."""
    done = kvcache("doctor", "--json")
    assert done.code == 0
    found = {each["what"]: each["text"] for each in json.loads(done.out)["findings"]}
    assert found["torch"].startswith(torch.__version__)
    assert any(what.startswith("device") for what in found)


def test_every_key_of_a_run_is_documented(kvcache: Kvcache, tmp_path: Path) -> None:
    """The table of `run` has each key that it says, and no other ones on top."""
    sizes = ("--tokens-per-block", 16, "--primary-blocks", 60, "--secondary-blocks", 40)
    done = kvcache(
        *("run", TRACE, "--limit", 60, *sizes, "--check-feed", "--json", "--log", tmp_path / "log"),
        *("--set", "max_sequence_length=900"),
    )
    assert_documented("run", json.loads(done.out))
