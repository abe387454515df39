"""Metrics for Prometheus: what they say of random logs, who gets them, and that a real Prometheus reads them."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from kvcache.manager import KVCacheManager
from sinks import SinkOpenError, SinkRunner, open_sink
from sinks.base import SinkContext, SinkURLError
from sinks.histogram import Histogram
from sinks.prometheus import MAX_CONNECTIONS, BlockMetrics, PrometheusSink
from tests.oracles.naive_metrics import NaiveMetrics
from tests.support.feeds.scraping import (
    DOCS,
    a_real_prometheus,
    ask_prometheus,
    cache,
    scraped,
    serve_some,
    settled,
    sink_of,
    used_in,
    value,
)
from tests.support.logs.random_logs import random_log
from tests.support.needs import program
from tests.support.ports import free_port
from tests.support.seeds import seeds
from tests.support.servers.certificates import self_signed
from tests.support.waiting import WAIT, wait_until

CONTEXT = SinkContext(32, 4, "llama")


@pytest.mark.parametrize("seed", seeds(range(12), quick=3))
def test_metrics_are_those_of_a_naive_count(seed: int, tmp_path: Path) -> None:
    """Counters and histograms of random logs, with gaps, restarts and failing copies, block by block."""
    metrics, naive = BlockMetrics(), NaiveMetrics()
    for batch in LogReader(random_log(seed, tmp_path / "log")):
        metrics.fold(batch)
        naive.fold(batch)
    counts = naive.counts
    assert metrics.counts["requests"] == counts["requests"] > 10
    assert metrics.counts["prefix_cache_queries"] == counts["prompt"]
    assert sum(metrics.reused_tokens.values()) == counts["reused"]
    for where in ("secondary", "partial"):
        assert metrics.reused_tokens[where] == counts["reused", where]
    for name in ("finished", "refused"):
        assert metrics.counts[f"requests_{name}"] == counts[name], name
    for name in ("allocated", "stored", "copied", "recomputed"):
        assert metrics.counts[f"blocks_{name}"] == counts[name], name
    assert metrics.counts["metrics_lost_batches"] == counts["lost"]
    assert metrics.counts["copies_failed"] == counts["failed"]
    removed = {key: count for key, count in metrics.removed.items() if count}
    assert removed == {key[1:]: n for key, n in counts.items() if key[0] == "removed" and n}
    for way in ("offload", "onboard"):
        assert (metrics.moved[way], metrics.moved_bytes[way]) == (counts["moved", way], counts["bytes", way])
        agrees(metrics.copy_seconds[way], naive.ages["copy", way])
    for level in ("primary", "secondary"):
        agrees(metrics.idle_before_evict[level], naive.ages["idle", level])
        agrees(metrics.lifetime[level], naive.ages["lifetime", level])
        agrees(metrics.reuse_gap[level], naive.ages["gap", level])


def agrees(histogram: Histogram, ages: list[int]) -> None:
    """The histogram is that of these ages."""
    buckets, total = histogram.cumulative()
    for bound, count in buckets:
        assert count == sum(age <= float(bound) * 1e9 for age in ages), bound
    assert total == pytest.approx(sum(ages) / 1e9)


@pytest.mark.long
def test_random_logs_have_ages_to_compare(tmp_path: Path) -> None:
    """The comparison above is not one of empty histograms."""
    found = {"idle": 0, "lifetime": 0, "gap": 0, "copy": 0}
    for seed in range(6):
        naive = NaiveMetrics()
        for batch in LogReader(random_log(seed, tmp_path / str(seed))):
            naive.fold(batch)
        for (kind, _), ages in naive.ages.items():
            found[kind] += len(ages)
    assert min(found.values()) > 20, found


def test_bounds_belong_to_their_buckets() -> None:
    """A duration as long as a bound is counted there, by either way of counting."""
    one, many = Histogram([1.0, 2.0]), Histogram([1.0, 2.0])
    durations = [0, 10**9, 10**9 + 1, 2 * 10**9, 3 * 10**9]
    for duration in durations:
        one.add(duration)
    many.observe(np.array(durations, np.int64))
    assert one.cumulative() == many.cumulative()
    buckets, total = one.cumulative()
    assert buckets == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert total == pytest.approx(7.000000001)


def test_a_manager_serves_what_its_stats_say() -> None:
    """Gauges, step times and sinks are the manager's own; counters those of its events."""
    with KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager:
        serve_some(manager)
        manager.add_sequence("last", [8] * 5)
        manager.flush()
        samples, stats = settled(manager), manager.stats()
        assert value(samples, "requests_total") == 13
        assert value(samples, "requests_running") == stats.sequences == 1
        hits = [value(samples, "prefix_cache_hits_total", level=level) for level in ("primary", "secondary")]
        assert hits == [stats.reused_tokens_primary, stats.reused_tokens_secondary]
        assert min(hits) > 0
        assert value(samples, "blocks_stored_total") == stats.blocks_stored
        cached = [
            value(samples, "prompt_blocks_total", cached=kind) for kind in ("full", "partial", "missed")
        ]
        assert cached == [stats.blocks_reused_full, stats.blocks_reused_partial, stats.blocks_missed]
        assert min(cached[0], cached[2]) > 0
        assert value(samples, "blocks_first_used_total") == stats.blocks_allocated_new == 8
        assert value(samples, "copied_bytes_total") == stats.bytes_copied
        assert value(samples, "events_total") == stats.events
        for level, name in enumerate(("primary", "secondary")):
            states = [value(samples, "blocks", level=name, state=s) for s in ("held", "reusable", "blank")]
            assert sum(states) == stats.blocks_total[level]
            assert states[1:] == [stats.blocks_unreferenced[level], stats.blocks_blank[level]]
        assert value(samples, "usage_ratio", level="primary") == 3 / 8
        assert value(samples, "step_seconds_count") > 20
        assert 0 < value(samples, "step_seconds_sum") < 60
        name = "prometheus://127.0.0.1:0"
        assert value(samples, "sink_batches_total", sink=name) == stats.batches
        assert value(samples, "sink_up", sink=name) == 1


def test_step_times_are_the_time_in_calls() -> None:
    """What the engine does between the manager's calls does not count, and nothing is measured unasked."""
    with KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager:
        ticks = iter(range(0, 10**12, 1_000_000))
        manager._guard.clock, manager._guard.spent_ns = lambda: next(ticks), 0
        manager.add_sequence(1, [1, 2, 3])
        manager.flush()
        manager.add_tokens([1], [1])
        manager.flush()
        # One call and, before the second flush ends, the first one and another.
        assert value(settled(manager), "step_seconds_sum") == pytest.approx(0.003)
    with KVCacheManager(cache()) as manager:
        assert manager._guard.clock is None


def test_a_log_is_among_the_metrics(tmp_path: Path) -> None:
    """Batches, bytes and lag of the log."""
    with KVCacheManager(cache(), log=tmp_path / "log", sinks=["prometheus://127.0.0.1:0"]) as manager:
        serve_some(manager, 3)
        wait_until(lambda: not value(settled(manager), "log_lag_batches"))
        samples = settled(manager)
        assert value(samples, "log_batches_total") == manager.stats().batches
        assert value(samples, "log_bytes_total") > 100
        assert (value(samples, "log_up"), value(samples, "log_dropped_batches_total")) == (1, 0)


def test_metrics_report_no_tokens_names_or_ids() -> None:
    """Prompts, request ids and salts are nowhere in the text."""
    with KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager:
        manager.add_sequence(
            "secret-request", [1_234_567] * 9, cache_salt="secret-salt", lora_name="secret-lora"
        )
        manager.store_context_blocks("secret-request", 9)
        manager.flush()
        settled(manager)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink_of(manager).port}/metrics") as answer:
            text = answer.read().decode()
    assert "kvcache_blocks_stored_total" in text
    assert "secret" not in text
    assert "1234567" not in text


def test_a_port_that_is_taken_is_reported() -> None:
    """The manager is not made, and the error names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SinkOpenError, match=f"cannot listen on 127.0.0.1:{port}"):
            KVCacheManager(cache(), sinks=[f"prometheus://127.0.0.1:{port}"])


@pytest.mark.parametrize("form", ["prometheus://:{port}", "prometheus://0.0.0.0:{port}"])
def test_without_a_host_it_listens_on_all_addresses(form: str) -> None:
    """As in the docs; by the other address of this machine, too, and by IPv6 where there is any."""
    port = free_port()
    with KVCacheManager(cache(), sinks=[form.format(port=port)]):
        for host in ("127.0.0.1", "127.0.0.2", *(["[::1]"] if form.startswith("prometheus://:") else [])):
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=WAIT) as answer:
                assert b"kvcache_requests_total" in answer.read()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_errors_name_the_port(host: str) -> None:
    """Also where all addresses are meant."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SinkOpenError, match=f"{port}.*in use"):
            KVCacheManager(cache(), sinks=[f"prometheus://{host}:{port}"])


def test_idle_connections_neither_pile_up_nor_keep_others_out() -> None:
    """Hundreds of them: there is a thread and a file for a few, the oldest go, and metrics are served all the while."""
    with KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager, ExitStack() as idle:
        port, threads = sink_of(manager).port, threading.active_count()
        for _ in range(300):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), WAIT))
        assert ("kvcache_requests_total", frozenset({("model", "llama")})) in scraped(port)
        # The threads of those that are cut off end in a moment.
        wait_until(lambda: threading.active_count() <= threads + MAX_CONNECTIONS + 1)


def test_without_a_thread_a_connection_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no thread left for a while: who came then is hung up on, and later ones are served."""
    with KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager:
        port, start = sink_of(manager).port, threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if "process_request_thread" in thread.name:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with socket.create_connection(("127.0.0.1", port), WAIT) as refused:
                assert refused.recv(1) == b""
        assert ("kvcache_requests_total", frozenset({("model", "llama")})) in scraped(port)
        server = sink_of(manager)._server
        assert server is not None
        wait_until(lambda: not server._since)


def test_who_asks_for_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one who says a little now and then."""
    monkeypatch.setattr("sinks.prometheus.MAX_SECONDS", 0.3)
    with (
        KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"]) as manager,
        socket.create_connection(("127.0.0.1", sink_of(manager).port), WAIT) as slow,
    ):
        slow.sendall(b"GET /metrics HTTP/1.0\r\n")
        slow.settimeout(0.1)

        def hung_up() -> bool:
            try:
                slow.sendall(b"X-More: 1\r\n")
                return not slow.recv(1)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(hung_up)


@pytest.mark.needs("openssl")
def test_who_begins_no_handshake_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS others are served while somebody has connected and says nothing."""
    monkeypatch.setattr("sinks.prometheus.MAX_SECONDS", 3600)
    cert, key = self_signed(tmp_path)
    with KVCacheManager(
        cache(), sinks=[f"prometheus://127.0.0.1:0?certfile={cert}&keyfile={key}"]
    ) as manager:
        port = sink_of(manager).port
        context = ssl.create_default_context(cafile=str(cert))
        with (
            socket.create_connection(("127.0.0.1", port), WAIT),
            urllib.request.urlopen(
                f"https://127.0.0.1:{port}/metrics", context=context, timeout=WAIT
            ) as answer,
        ):
            assert b"kvcache_requests_total" in answer.read()


def test_certificates_that_cannot_be_read_are_reported() -> None:
    """When the sink is opened."""
    with pytest.raises(SinkOpenError, match="certificates cannot be used: No such file"):
        KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0?certfile=/none&keyfile=/none"])


def test_a_closed_sink_does_not_listen() -> None:
    """And its port can be had again."""
    manager = KVCacheManager(cache(), sinks=["prometheus://127.0.0.1:0"])
    port = sink_of(manager).port
    scraped(port)
    manager.close()
    with pytest.raises(urllib.error.URLError):
        scraped(port)
    with KVCacheManager(cache(), sinks=[f"prometheus://127.0.0.1:{port}"]):
        scraped(port)


def test_without_a_manager_it_serves_what_events_say() -> None:
    """A runner of one's own: no gauges, no error."""
    sink = open_sink("prometheus://127.0.0.1:0", CONTEXT)
    runner = SinkRunner(sink, "metrics")
    runner.start()
    assert isinstance(sink, PrometheusSink)
    names = {name for name, _ in scraped(sink.port)}
    runner.close()
    assert "kvcache_requests_total" in names
    assert "kvcache_blocks" not in names


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("prometheus://:9090/metrics2", "only host and port"),
        ("prometheus://:9090?certfile=a", "must be given together"),
        ("prometheus://:9090?client_cafile=a", "requires certfile and keyfile"),
        (
            "prometheus://:9090?interval=3",
            "known options: certfile, keyfile, client_cafile, label, label_values",
        ),
        ("prometheus://user:secret@:9090", "remove the user and password"),
    ],
)
def test_urls_that_say_something_else_are_refused(url: str, reason: str) -> None:
    """With what to do instead."""
    with pytest.raises(SinkURLError, match=reason) as caught:
        open_sink(url, CONTEXT)
    assert "secret" not in str(caught.value)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extra that brings it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SinkURLError, match=r"kvcache\[prometheus\]"):
        open_sink("prometheus://:9090", CONTEXT)


@pytest.mark.needs("openssl")
def test_https_with_client_certificates(tmp_path: Path) -> None:
    """Who has none of the authority gets nothing."""
    cert, key = self_signed(tmp_path)
    client_cert, client_key = self_signed(tmp_path, "client")
    url = f"prometheus://127.0.0.1:0?certfile={cert}&keyfile={key}&client_cafile={client_cert}"
    with KVCacheManager(cache(), sinks=[url]) as manager:
        address = f"https://127.0.0.1:{sink_of(manager).port}/metrics"
        context = ssl.create_default_context(cafile=str(cert))
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(address, context=context, timeout=WAIT).read()
        context.load_cert_chain(client_cert, client_key)
        with urllib.request.urlopen(address, context=context, timeout=WAIT) as answer:
            assert b"kvcache_requests_total" in answer.read()


def test_requests_are_counted_by_a_label() -> None:
    """The first values have numbers of their own, all others together, and requests without one."""
    url = "prometheus://127.0.0.1:0?label=tenant&label_values=2"
    tenants = ["a", None, 'b\n"', "c", "a", "other", "d", "a"]
    naive: dict[str, list[int]] = {}
    with KVCacheManager(cache(), sinks=[url]) as manager:
        for number, tenant in enumerate(tenants):
            labels = {"agent": "x"} if tenant is None else {"tenant": tenant, "agent": "y"}
            admission = manager.add_sequence(number, [number % 2, 1, 2, 3, 4, 5, 6], labels=labels)
            manager.store_context_blocks(number, 7)
            manager.remove_sequence(number)
            manager.flush()
            shown = "" if tenant is None else tenant if tenant in ("a", 'b\n"') else "other"
            counts = naive.setdefault(shown, [0, 0, 0])
            for at, more in enumerate((1, 7, admission.reused_tokens)):
                counts[at] += more
        samples = settled(manager)
    for at, name in enumerate(("requests", "prompt_tokens", "reused_tokens")):
        found = {
            dict(labels)["value"]: number
            for (each, labels), number in samples.items()
            if each == f"kvcache_{name}_by_label_total" and dict(labels)["label"] == "tenant"
        }
        assert found == {shown: counts[at] for shown, counts in naive.items()}
    assert naive["other"][0] == 3
    assert sum(counts[2] for counts in naive.values()) > 0


# -- what stands in the docs


def exported_names(tmp_path: Path) -> set[str]:
    """All names of a manager with a log, as they are scraped."""
    with KVCacheManager(
        cache(), log=tmp_path / "log", sinks=["prometheus://127.0.0.1:0?label=tenant"]
    ) as manager:
        serve_some(manager)
        return {name for name, _ in settled(manager)}


def test_the_table_lists_exactly_what_is_served(tmp_path: Path) -> None:
    """docs/reference/metrics.md."""
    rows = [
        line.split("|")[1]
        for line in (DOCS / "reference" / "metrics.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    listed = {f"kvcache_{name}" for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported_names(tmp_path)}
    assert listed == names


def test_dashboard_and_alerts_ask_for_what_is_served(tmp_path: Path) -> None:
    """Every expression, and every alert has its line in the docs."""
    names = exported_names(tmp_path)
    dashboard = json.loads((DOCS / "monitoring" / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    alerts = (DOCS / "monitoring" / "alerts.yml").read_text()
    assert len(asked) > 20
    assert all(used_in(expression) and used_in(expression) <= names for expression in asked)
    assert used_in(alerts) <= names
    guide = (DOCS / "how-to" / "monitoring.md").read_text()
    found = re.findall(r"alert: (\w+)", alerts)
    assert len(found) == 15
    assert all(f"`{alert}`" in guide for alert in found)


def alerts_of(series: dict[str, str], tmp_path: Path) -> list[str]:
    """Which alerts these series raise within ten minutes, one value each minute, in promtool's notation."""
    alerts = DOCS / "monitoring" / "alerts.yml"
    names = re.findall(r"alert: (\w+)", alerts.read_text())
    (tmp_path / "test.yml").write_text(
        json.dumps(
            {
                "rule_files": [str(alerts)],
                "evaluation_interval": "1m",
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": [
                            {"series": name, "values": values} for name, values in series.items()
                        ],
                        "alert_rule_test": [{"eval_time": "10m", "alertname": name} for name in names],
                    }
                ],
            }
        )
    )
    command = [program("promtool"), "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return sorted(set(re.findall(r"alertname:\s*(\w+), time: 10m", done.stdout + done.stderr)))


SINK = '{instance="a",model="m",sink="nats"}'
CACHE = '{instance="a",model="m"}'


@pytest.mark.needs("promtool")
@pytest.mark.parametrize(
    ("series", "raised"),
    [
        ({'up{job="kvcache",instance="a"}': "1 0x10"}, ["KVCacheUnreachable"]),
        ({'up{job="kvcache",instance="a"}': "1x10"}, []),
        (
            {
                f"kvcache_last_batch_age_seconds{CACHE}": "0+60x10",
                f"kvcache_requests_running{CACHE}": "3x10",
            },
            ["KVCacheSilent"],
        ),
        (
            {
                f"kvcache_last_batch_age_seconds{CACHE}": "0+60x10",
                f"kvcache_requests_running{CACHE}": "0x10",
            },
            [],
        ),
        (
            {
                f"kvcache_sink_up{SINK}": "1 1 0x10",
                f"kvcache_sink_errors_total{SINK}": "0 0 1+5x10",
                f"kvcache_sink_lag_batches{SINK}": "0 0 1000+500x10",
            },
            ["KVCacheSinkDown", "KVCacheSinkFails", "KVCacheSinkLags"],
        ),
        ({f"kvcache_log_lag_batches{CACHE}": "2000x10"}, ["KVCacheLogLags"]),
        ({f"kvcache_sink_refused_peers_total{SINK}": "0x5 3x5"}, ["KVCacheRefusesPeers"]),
        ({f"kvcache_sink_up{SINK}": "1x10", f"kvcache_sink_errors_total{SINK}": "7x10"}, []),
    ],
)
def test_alerts_are_raised_by_what_they_are_about(
    series: dict[str, str], raised: list[str], tmp_path: Path
) -> None:
    """And by nothing else: by Prometheus' own test of rules."""
    assert alerts_of(series, tmp_path) == raised


@pytest.mark.needs("prometheus")
def test_a_real_prometheus_scrapes_them_and_knows_the_rules(tmp_path: Path) -> None:
    """Debian's: the counters arrive, all rules evaluate, and every expression of the dashboard is understood."""
    with KVCacheManager(cache(), log=tmp_path / "log", sinks=["prometheus://127.0.0.1:0"]) as manager:
        serve_some(manager)
        settled(manager)
        with a_real_prometheus(tmp_path, sink_of(manager).port) as asked:
            ask_prometheus(asked)
