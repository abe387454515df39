"""Prometheus metrics fetched and parsed, and a real Prometheus that scrapes them."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvcache.config import KVCacheConfig
from kvcache.manager import KVCacheManager
from sinks.prometheus import PrometheusSink
from tests.support.engines import strategies
from tests.support.needs import program
from tests.support.ports import free_port
from tests.support.waiting import WAIT, wait_until

DOCS = Path(__file__).parents[3] / "docs"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def cache(**settings: Any) -> KVCacheConfig:
    return strategies.config(secondary_blocks=4, model="llama", **settings)


def sink_of(manager: KVCacheManager) -> PrometheusSink:
    sink = manager._journal.outputs._runners[0].sink
    assert isinstance(sink, PrometheusSink)
    return sink


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["kvcache_" + name, frozenset({"model": "llama", **labels}.items())]


def settled(manager: KVCacheManager) -> Samples:
    """The metrics once the sink has taken all batches."""
    wait_until(lambda: not manager.sink_stats()[0].lag_batches)
    return scraped(sink_of(manager).port)


def serve_some(manager: KVCacheManager, requests: int = 12) -> None:
    for number in range(requests):
        manager.add_sequence(number, [number // 2 % 3, 1, 2, 3, 4, 5, 6])
        manager.store_context_blocks(number, 7)
        manager.flush()
        manager.add_tokens([number], [9])
        manager.remove_sequence(number)
        manager.flush()


def used_in(expression: str) -> set[str]:
    return set(re.findall(r"kvcache_\w+", expression))


@contextmanager
def a_real_prometheus(directory: Path, port: int) -> Iterator[Callable[[str], Any]]:
    """One that fetches metrics from that port and has the alerts; what its API answers to a path."""
    prometheus = program("prometheus")
    (directory / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}\n"
        "scrape_configs:\n"
        "  - job_name: kvcache\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
        f"rule_files: ['{DOCS / 'monitoring' / 'alerts.yml'}']\n"
    )
    address = f"127.0.0.1:{free_port()}"
    command = [prometheus, f"--config.file={directory / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={directory / 'db'}", f"--web.listen-address={address}"]

    def asked(path: str) -> Any:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=WAIT) as answer:
            return json.loads(answer.read())["data"]

    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield asked
    finally:
        server.terminate()
        server.wait(WAIT)


def ask_prometheus(asked: Callable[[str], Any]) -> set[str]:
    """Check what it has; returns the dashboard's expressions to which there is an answer."""

    def query(expression: str) -> Any:
        return asked("query?" + urllib.parse.urlencode({"query": expression}))["result"]

    found, rules = until_fetched(
        lambda: (query("kvcache_requests_total"), asked("rules")["groups"][0]["rules"])
    )
    assert found[0]["value"][1] == "12"
    assert found[0]["metric"]["model"] == "llama"
    assert len(rules) == 15
    dashboard = json.loads((DOCS / "monitoring" / "dashboard.json").read_text())
    answered = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m")
            for variable in ("$model", "$instance"):
                expression = expression.replace(variable, ".*")
            if query(expression):  # what is not understood is an HTTP error
                answered.add(target["expr"])
    return answered


def until_fetched(ask: Callable[[], Any]) -> Any:
    answers: list[Any] = []

    def fetched() -> bool:
        with suppress(OSError):  # also what HTTP refuses while it starts
            answers[:] = found, rules = ask()
            return bool(found) and all(rule["health"] == "ok" for rule in rules)
        return False

    wait_until(fetched, "Prometheus has not fetched the metrics", meanwhile=lambda: time.sleep(0.05))
    return answers
