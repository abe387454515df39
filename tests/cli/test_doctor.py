"""`kvcache doctor`: what is looked at, and what is said about what is missing."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvcache import __version__
from kvcache.cli import doctor
from tests.support.commands import Kvcache

pytestmark = pytest.mark.usefixtures("stand_in_for_torch")


def findings(done: Any) -> dict[str, tuple[str, str]]:
    return {each["what"]: (each["verdict"], each["text"]) for each in json.loads(done.out)["findings"]}


def test_this_machine(kvcache: Kvcache) -> None:
    """Versions, packages, a device and limits are reported; here nothing is wrong."""
    done = kvcache("doctor", "--json")
    found = findings(done)
    assert done.code == 0
    assert found["kvcache"][1].startswith(__version__)
    for what in ("python", "numpy", "torch", "rich", "open files", "lockable memory", "free memory", "sinks"):
        assert what in found
    assert any(what.startswith("device") for what in found)
    assert found["package events"] == found["package sinks"] == ("ok", "ours")
    people = kvcache("doctor")
    assert people.code == 0
    for what in found:
        assert what in people.out


def test_missing_packages(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra that is missing is a note with what to install; a core package is a problem."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "xxhash", "msgspec"):
            raise PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(doctor, "version", version)
    done = kvcache("doctor", "--json")
    found = findings(done)
    assert done.code == 1
    assert found["torch"][0] == found["xxhash"][0] == "note"
    assert "pip install 'kvcache[torch]'" in found["torch"][1]
    assert "pip install 'kvcache[hash]'" in found["xxhash"][1]
    assert found["msgspec"] == ("problem", "missing: pip install kvcache")
    assert not any(what.startswith("device") for what in found)


def test_foreign_events(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution that installs a package `events` is named."""
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {"events": ["kvcache", "Events"]})
    verdict, text = findings(kvcache("doctor", "--json"))["package events"]
    assert verdict == "note"
    assert "pip uninstall Events" in text


def test_environment(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that hold settings are named, one that is none is noted, and those of Kubernetes are nothing."""
    monkeypatch.setenv("KVCACHE_SERVICE_HOST", "10.0.0.1")
    assert findings(kvcache("doctor", "--json"))["environment"] == ("ok", "settings: none")
    monkeypatch.setenv("KVCACHE_HEAD_DIM", "16")
    assert findings(kvcache("doctor", "--json"))["environment"] == ("ok", "settings: KVCACHE_HEAD_DIM")
    monkeypatch.setenv("KVCACHE_MODEL_NAME", "se-cret")
    done = kvcache("doctor", "--json")
    found = [
        (each["verdict"], each["text"])
        for each in json.loads(done.out)["findings"]
        if each["what"] == "environment"
    ]
    assert (done.code, found) == (
        0,
        [
            ("note", "KVCACHE_MODEL_NAME (did you mean KVCACHE_MODEL?) is no setting and is ignored"),
            ("ok", "settings: KVCACHE_HEAD_DIM"),
        ],
    )


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVCACHE_HEAD_DIM", "x", "head_dim: given 'x'; accepted: an integer from 1 to 2147483647"),
        (
            "KVCACHE_TOKENS_PER_BLOCK",
            "3",
            "tokens_per_block: given '3'; accepted: a power of two, at least 1, at most 2**30",
        ),
        ("KVCACHE_LOG__FSYNC", "z", "log.fsync: given 'z'; accepted: always, group, interval or never"),
        (
            "KVCACHE_MAX_ATTENTION_WINDOW",
            "1,x",
            (
                "max_attention_window: given '1,x'; accepted: windows in tokens, from 1 on "
                "(full: max_sequence_length or more), one per layer or fewer, or none"
            ),
        ),
    ],
)
def test_unusable_variable(
    kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    """A variable whose value no configuration takes is a problem, in the words of `kvcache config`."""
    monkeypatch.setenv("KVCACHE_DTYPE", "float16")
    monkeypatch.setenv(variable, value)
    done = kvcache("doctor", "--json")
    assert (done.code, findings(done)["environment"]) == (1, ("problem", f"{variable}: {says}"))
    assert kvcache("config").err == f"kvcache: error: {variable}: {says}\n"


def test_variables_that_others_complete(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether variables fit what a file says is not known here, and no problem."""
    monkeypatch.setenv("KVCACHE_NUM_KV_HEADS", "1,2,3")
    monkeypatch.setenv("KVCACHE_MAX_ATTENTION_WINDOW", "none")
    assert kvcache("doctor").code == 0


def test_few_files(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A low limit of open files is noted with what raises it."""
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 256))
    assert findings(kvcache("doctor", "--json"))["open files"] == ("note", "256; raise it with ulimit -n")


def test_memory_where_nobody_says_what_is_free(
    kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On macOS only the machine's memory is known, and that is said."""
    monkeypatch.setattr(doctor, "free_bytes", lambda: 3 << 30)
    for meminfo, says in ((tmp_path, "3.0 GiB"), (tmp_path / "missing", "at most 3.0 GiB")):
        monkeypatch.setattr(doctor, "_MEMINFO", meminfo)
        assert findings(kvcache("doctor", "--json"))["free memory"] == ("ok", says)


def test_broken_torch(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that cannot be imported is a problem, not a crash."""

    def fail(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", fail)
    done = kvcache("doctor", "--json")
    assert done.code == 1
    assert "libcudart" in findings(done)["device"][1]
