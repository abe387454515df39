"""``kvcache report``: what the page is made of, that its numbers are those of the audit, and that it does no harm."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.log import LogReader
from events.types import PRIMARY
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.audit.advice import AdviceLine
from kvcache.audit.explanation import explain_request
from kvcache.audit.kv_shape import KVShape
from kvcache.audit.prefill import PrefillModel, PrefillTotals, Pricing, hours_between
from kvcache.audit.reasons import IN_WORDS, Reason
from kvcache.audit.totals import audit_batches
from kvcache.audit.turns import KINDS_IN_WORDS
from kvcache.errors import OutOfBlocks, UsageError
from kvcache.fold.slot_states import BLANK, UNREFERENCED, UNREFERENCED_IN_FLIGHT
from kvcache.manager import Substitutes
from kvcache.phrases import duration, few, share
from kvcache.replay import replay
from kvcache.report import page as page_module
from kvcache.report.charts import GROUPS, curve_by_size, hit_rates_by_timeout
from kvcache.report.data import Phase, read_report_data
from kvcache.report.imported import ImportedCurve, Size, Supplements, WhatIf, understood
from kvcache.report.page import HOME, report, templates
from kvcache.workload.reported import ReportedHour
from tests.support.commands import Kvcache, RunPython, run_log, segments
from tests.support.logs.agents import write_agents_trace
from tests.support.logs.random_logs import random_log
from tests.support.logs.served import round_robin, serve
from tests.support.needs import program
from tests.support.seeds import seeds
from tests.support.servers.browser import Browser

if find_spec("plotly") is None:
    pytest.skip("plotly is not installed: pip install 'kvcache[report]'", allow_module_level=True)

NASTY = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'><b>&amp;\u2028",
    "<!--<script>",
)
SALT = "a salt that nobody may see"
TOKENS = 987_000_000
"""All token ids of the log of nasty names are above it."""


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self.explanations: list[list[str]] = []
        """Of each lane, in lines: headings, facts and rows."""
        self._open: str | None = None
        self._explains = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag == "template":
            self._explains = str(dict(attrs)["id"]).startswith("explained-")
            if self._explains:
                self.explanations.append([])
        elif self._explains and tag in ("h4", "dt", "tr"):
            self.explanations[-1].append("")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = None
        self._explains = self._explains and tag != "template"

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        elif self._open != "style":
            self.text.append(data)
            if self._explains and self._open in ("h4", "dt", "dd", "th", "td"):
                self.explanations[-1][-1] += f" {data}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        """The blocks of JSON."""
        return {
            str(attributes["id"]): json.loads(text)
            for attributes, text in self.scripts
            if attributes.get("type") == "application/json"
        }

    @property
    def code(self) -> list[str]:
        """The scripts that run."""
        return [text for attributes, text in self.scripts if "type" not in attributes]


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of a run that was so short of room that evictions cost computation."""
    directory = tmp_path_factory.mktemp("logs") / "busy"
    return run_log(directory, "--primary-blocks", 80, "--secondary-blocks", 20, "--concurrency", 3)


@pytest.fixture(scope="session")
def html(busy: Path) -> str:
    return report(busy)


@pytest.fixture(scope="session")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of sessions of several tenants."""
    directory = tmp_path_factory.mktemp("agents")
    trace = write_agents_trace(directory / "trace.jsonl")
    return run_log(directory / "log", "--primary-blocks", 200, "--concurrency", 3, trace=trace)


@pytest.fixture(scope="session")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose names would be markup, of requests that evict each other."""
    directory = tmp_path_factory.mktemp("logs") / "<b>&nasty"
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=4)
    clock = Substitutes(wall_ns=itertools.count(10**18, 10**9).__next__)
    with KVCacheManager(config, log=directory, substitutes=clock) as manager:
        for _ in range(2):
            for number, name in enumerate(NASTY):
                tokens = [TOKENS + 100 * number + place for place in range(14)]
                labels = {"tenant": name}
                manager.add_sequence(
                    name, tokens, lora_name=NASTY[0], cache_salt=SALT, session=name, labels=labels
                )
                manager.flush()
                manager.store_context_blocks(name, 14)
                manager.remove_sequence(name)
                manager.flush()
    return directory


class TestStructure:
    """A page that stands alone, and that everybody can read."""

    def test_nothing_comes_from_elsewhere(self, html: str, page: Page) -> None:
        """No tag loads or links anything outside, and a policy forbids what scripts might ask for."""
        links = [
            each[name] for _, each in page.tags for name in ("src", "href", "action", "data") if name in each
        ]
        assert links
        assert [link for link in links if not str(link).startswith("#")] == []
        assert page.all("link") == page.all("iframe") == page.all("base") == []
        style = html[html.index("<style>") : html.index("</style>")]
        assert "url(" not in style
        assert "@import" not in style
        policy = str(next(each["content"] for each in page.all("meta") if "http-equiv" in each))
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe-inline" not in policy.partition("style-src")[0]

    def test_the_policy_lets_its_own_scripts_run(self, page: Page) -> None:
        """It names the digests of both."""
        policy = str(next(each["content"] for each in page.all("meta") if "http-equiv" in each))
        digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in page.code]
        assert re.findall(r"'sha256-([^']+)'", policy) == digests
        assert len(digests) == 2

    def test_people_find_their_way(self, page: Page) -> None:
        """Language, title, one main heading, sections with headings and links, charts and tables with names."""
        assert page.all("html")[0]["lang"] == "en"
        assert "busy: KV cache report" in page.text
        assert len(page.all("h1")) == len(page.all("main")) == 1
        names = [each["id"] for each in page.all("section")]
        assert names == ["headlines", "misses", "time", "levels", "ages", "prefixes", "settings", "requests"]
        ids = {each["id"] for _, each in page.tags if "id" in each}
        assert {each["aria-labelledby"] for each in page.all("section")} <= ids
        assert {str(each["href"])[1:] for each in page.all("a")} <= ids
        charts = [each for each in page.all("div") if "data-chart" in each]
        assert {each["data-chart"] for each in charts} == page.data["charts"].keys()
        assert all(each["role"] == "img" and len(str(each["aria-label"])) > 20 for each in charts)
        assert len(page.all("caption")) == len(page.all("table"))
        assert any(each.get("name") == "viewport" for each in page.all("meta"))

    def test_it_is_small_enough(self, html: str) -> None:
        """Most of it is the library that draws."""
        assert len(html.encode()) - len(page_module.plotly_js()) < 500_000

    def test_the_script_is_javascript(self, page: Page, tmp_path: Path) -> None:
        """Node takes it."""
        node = shutil.which("node")
        if node is None:
            pytest.skip("there is no node")
        (tmp_path / "page.js").write_text(page.code[1])
        done = subprocess.run([node, "--check", tmp_path / "page.js"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


class TestNumbers:
    """The page says what the audit says."""

    def test_headlines_are_the_audits(self, busy: Path, page: Page) -> None:
        """The numbers for programs, and those for people."""
        audit = audit_batches((batch, True) for batch in LogReader(busy))
        lost = sum(audit.lost_by_priority.values())
        assert lost > 0
        assert page.data["facts"] == {
            "requests": audit.requests,
            "refusals": audit.refusals,
            "prompt_tokens": audit.prompt_tokens,
            "reused_tokens": audit.reused,
            "tokens_computed_again": lost,
            "offloaded_blocks": audit.offloaded,
            "onboarded_blocks": audit.onboarded,
            "end": "clean",
        }
        assert f"{audit.prompt_tokens:,}" in page.text
        assert f"{lost:,} tokens, because they were evicted" in page.text

    def test_charts_add_up(self, busy: Path, page: Page) -> None:
        """Bars by reason, bars over time, and lanes each hold all tokens."""
        audit = audit_batches((batch, True) for batch in LogReader(busy))
        [bars] = page.data["charts"]["misses"]["data"]
        said = dict(zip([label.replace("<br>", " ") for label in bars["y"]], bars["x"], strict=True))
        assert said == {
            IN_WORDS[reason]: int(audit.reasons[reason])
            for reason in Reason
            if not reason.is_reuse and audit.reasons[reason]
        }
        over_time = {each["name"]: sum(each["y"]) for each in page.data["charts"]["time"]["data"]}
        sums = {group.name: int(audit.reasons[list(group.reasons)].sum()) for group in GROUPS}
        assert over_time == {name: tokens for name, tokens in sums.items() if tokens}
        lanes = np.sum(page.data["lanes-data"]["tokens"], axis=0).tolist()
        assert lanes[:2] == [sums["reused from primary"], sums["reused from secondary"]]
        assert lanes[2:4] == [sums["computed again: evicted"], sums["computed again: cleared or lost"]]
        assert sum(lanes) == audit.prompt_tokens

    def test_the_hit_rate_over_time_is_the_audits(self, busy: Path, page: Page) -> None:
        """Weighted by the tokens of each part of the time, the points of the line add up to what was reused."""
        audit = audit_batches((batch, True) for batch in LogReader(busy))
        [line] = page.data["charts"]["rate"]["data"]
        tokens = audit.over_time.rows.sum(axis=1).tolist()
        assert [rate is None for rate in line["y"]] == [not total for total in tokens]
        reused = sum((rate or 0) * total for rate, total in zip(line["y"], tokens, strict=True))
        assert reused == pytest.approx(audit.reused, rel=1e-3)
        assert page.data["charts"]["rate"]["layout"]["yaxis"]["tickformat"] == ".0%"

    def test_the_settings_are_the_logs(self, page: Page) -> None:
        """Sizes in a sentence, and every setting in the table."""
        sentence = next(text for text in page.text if text.startswith("At the end of the log: "))
        assert "80 primary and 20 secondary blocks" in sentence
        at = page.text.index("tokens_per_block")
        assert page.text[at + 1] == "16"
        assert {"log.fsync", "eviction_policy", "hash_algorithm"} <= set(page.text)

    def test_prefixes_at_the_same_position_have_different_labels(self, busy: Path, page: Page) -> None:
        """A label has the start of the name of the prefix's last block."""
        [tree] = page.data["charts"]["prefixes"]["data"]
        prefixes = read_report_data(busy).audit.prefixes
        assert len(prefixes) == len(tree["labels"]) - 1
        for prefix, label in zip(prefixes, tree["labels"][1:], strict=True):
            assert prefix.name is not None
            assert label == f"tokens {prefix.first:,}–{prefix.stop - 1:,}<br>block {prefix.name[:8]}…"

    def test_every_reason_has_one_colour(self) -> None:
        """Each is in exactly one group."""
        assert sorted(reason for group in GROUPS for reason in group.reasons) == list(Reason)

    def test_lanes_are_in_order_of_cost(self, page: Page) -> None:
        """What computed most is first."""
        computed = [sum(tokens[2:]) for tokens in page.data["lanes-data"]["tokens"]]
        assert computed == sorted(computed, reverse=True)
        assert len(computed) == page.data["facts"]["requests"]

    def test_explanations_are_those_of_the_command(self, busy: Path, page: Page, kvcache: Kvcache) -> None:
        """Word for word, cell by cell."""
        for lane in (0, 7, len(page.data["lanes-data"]["ids"]) - 1):
            said = kvcache("explain", busy, "--request", page.data["lanes-data"]["ids"][lane]).out
            lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
            assert lines == [" ".join(line.split()) for line in page.explanations[lane]]

    def test_occupancy_is_the_states(self, busy: Path) -> None:
        """At several moments the counts are those of the slots' states, worked out from a replay."""
        found = read_report_data(busy)
        seqs = {batch.ts: batch.seq for batch in LogReader(busy)}
        samples = found.samples
        for sample in (samples[0], samples[len(samples) // 2], samples[-1]):
            state = replay(busy, seqs[sample.at]).state
            for level, states in enumerate(state.slot_states(0)):
                kinds = list(map(int, states))
                blank = kinds.count(BLANK)
                free = kinds.count(UNREFERENCED) + kinds.count(UNREFERENCED_IN_FLIGHT)
                [filled] = [each for (_, at), each in sample.filled.items() if at == level]
                assert filled == (len(kinds) - blank - free, free, blank)

    def test_occupancy_keeps_the_fullest_moment(self, busy: Path) -> None:
        """No moment of the log was fuller than the fullest that is shown."""
        held = 0
        for batch in list(LogReader(busy))[::25]:
            level = replay(busy, batch.seq).state.groups[0].levels[PRIMARY]
            held = max(held, level.size - len(level.blank) - level.unreferenced)
        assert max(sample.held for sample in read_report_data(busy).samples) >= held > 0

    @pytest.mark.parametrize("bills", [2, pytest.param(None, marks=pytest.mark.long)])
    def test_evictions_are_paid_by_those_who_computed_again(self, busy: Path, bills: int | None) -> None:
        """The bills add up, and each payer's explanation names the eviction."""
        found = read_report_data(busy)
        assert [bill.eviction for bill in found.bills] == found.audit.worst[: len(found.bills)]
        assert all(bill.payers.total() == bill.eviction.tokens for bill in found.bills)
        for bill in found.bills[:bills]:
            for payer in bill.payers:
                [explained] = explain_request(LogReader(busy), str(payer))
                parts = [part for stay in explained.stays for part in stay.parts if part.gone is not None]
                assert any(
                    part.gone is not None
                    and (part.gone.batch, part.gone_for) == (bill.eviction.batch, bill.eviction.for_request)
                    and part.reason in (Reason.EVICTED, Reason.DROPPED, Reason.COMPUTING_AGAIN)
                    for part in parts
                )

    @pytest.mark.parametrize("seed", seeds(range(8), quick=2))
    def test_every_log_has_a_report(self, seed: int, tmp_path: Path) -> None:
        """Several windows, lost batches, restarts, no tokens: the sums hold, and each eviction is paid for."""
        log = random_log(seed, tmp_path / "log")
        found = read_report_data(log)
        assert all(bill.payers.total() == bill.eviction.tokens for bill in found.bills)
        assert sum(int(lane.tokens.sum()) for lane in found.lanes) == found.audit.prompt_tokens
        for lane in found.lanes:
            assert all(one != other for (one, _), (other, _) in zip(lane.marks, lane.marks[1:], strict=False))
        page = Page(report(log))
        assert page.data["facts"]["prompt_tokens"] == found.audit.prompt_tokens
        assert len(page.explanations) == len(found.lanes)


class Clock:
    """A wall clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.seconds = 1_800_000_000

    def __call__(self) -> int:
        return self.seconds * 10**9


def test_a_lane_reports_waiting_computing_decoding_and_preemption(tmp_path: Path) -> None:
    """A request that is refused, admitted, computed in two steps, preempted, and admitted again."""
    clock = Clock()
    start = clock()
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=4)
    with KVCacheManager(config, log=tmp_path / "log", substitutes=Substitutes(wall_ns=clock)) as manager:

        def step() -> None:
            manager.flush()
            clock.seconds += 1

        step()
        manager.add_sequence("other", range(13))
        step()
        with pytest.raises(OutOfBlocks):
            manager.add_sequence("late", range(100, 113))
        step()
        manager.remove_sequence("other")
        manager.add_sequence("late", range(100, 113))
        step()
        manager.store_context_blocks("late", 8)
        step()
        manager.store_context_blocks("late", 13)
        step()
        manager.remove_sequence("late")
        step()
        step()
        manager.add_sequence("late", range(100, 113))
        step()
        manager.store_context_blocks("late", 13)
        step()
    lane = next(each for each in read_report_data(tmp_path / "log").lanes if each.request_id == "late")
    assert [(phase, (at - start) / 10**9) for phase, at in lane.marks] == [
        (Phase.WAITING, 2),
        (Phase.PREFILL, 3),
        (Phase.DECODE, 5),
        (Phase.AWAY, 6),
        (Phase.PREFILL, 8),
        (Phase.DECODE, 9),
    ]
    assert (lane.stays, lane.by_kind) == (2, (12, 0, 0, 0, 14))


def test_a_log_without_requests_has_a_report(tmp_path: Path) -> None:
    """A cache that nobody used: nothing to draw but its levels."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=4)
    with KVCacheManager(config, log=tmp_path / "log"):
        pass
    page = Page(report(tmp_path / "log", curve={"sizes": []}, whatif={**WHATIF, "trials": []}))
    assert page.data["facts"]["prompt_tokens"] == 0
    assert page.data["lanes-data"]["ids"] == []
    sections = [each["id"] for each in page.all("section")]
    assert sections == ["headlines", "misses", "levels", "settings", "curve", "whatif"]


def test_tenants_and_sessions(agents: Path, page: Page, kvcache: Kvcache) -> None:
    """A chart and a table of each, with the audit's numbers; nothing where requests have neither."""
    own, said = Page(report(agents)), dict[str, Any]()
    text = " ".join(each for each in own.text if each.strip())
    for by in ("tenant", "session"):
        said = json.loads(kvcache("audit", agents, "--by", by, "--top", 12, "--json").out)
        areas = own.data["charts"][f"groups-{by}"]["data"]
        shown = said["groups"][:7]
        assert [each["name"] for each in areas[: len(shown)]] == [each["name"] or "(none)" for each in shown]
        for at, area in enumerate(areas[: len(shown)]):
            assert area["y"] == [
                moment["blocks"][at] for moment in said["over_time"] if sum(moment["blocks"])
            ]
        for group in said["groups"]:
            numbers = ("requests", "prompt_tokens", "evicted_blocks", "evicted_for_it_blocks")
            row = rf"{re.escape(group['name'] or '(none)')} " + ".*? ".join(
                f"{group[key]:,}" for key in numbers
            )
            assert re.search(row, text)
    for each in said["turns"]:
        assert f"{KINDS_IN_WORDS[each['kind']]} {each['requests']:,} {each['prompt_tokens']:,}" in text
    assert "groups" not in [each["id"] for each in page.all("section")]


def test_many_sessions(tmp_path: Path, kvcache: Kvcache) -> None:
    """Where those with an area each have little of the cache: the largest ones, and how many reuse how much."""
    trace = write_agents_trace(tmp_path / "trace.jsonl", sessions=60, turns=2)
    log = run_log(tmp_path / "log", "--primary-blocks", 600, "--concurrency", 3, trace=trace)
    page = Page(report(log))
    groups = json.loads(kvcache("audit", log, "--by", "session", "--top", 100, "--json").out)["groups"]
    largest, rates = (page.data["charts"][name]["data"] for name in ("groups-session", "rates-session"))
    named = [each["name"] or "(none)" for each in groups[:12]]
    assert largest[0]["y"] == named[::-1]
    tokens = np.sum([bar["x"] for bar in largest], axis=0).tolist()
    assert tokens == [each["prompt_tokens"] for each in groups[:12]][::-1]
    reused = [
        Fraction(
            sum(each["reasons"][kind] for kind in ("primary", "secondary", "partial")), each["prompt_tokens"]
        )
        for each in groups
    ]
    by_tenth = [sum(min(int(10 * rate), 9) == at for rate in reused) for at in range(10)]
    assert rates[0]["y"] == by_tenth
    assert sum(by_tenth) == len(groups) > 40
    text = " ".join(page.text)
    assert (
        f"Half of the {len(groups)} reuse {share(float(sorted(reused)[len(groups) // 2]))} of their prompt tokens"
        in text
    )
    assert "groups-tenant" in page.data["charts"]
    assert "rates-tenant" not in page.data["charts"]


def test_what_to_do(tmp_path: Path, kvcache: Kvcache) -> None:
    """All that `kvcache advise` says of the log, with its commands; of a log with too few requests there is nothing."""
    for number, length in enumerate((200, 99)):
        log = serve(tmp_path / f"log {number}", round_robin(length, 20), primary_blocks=100)
        done = kvcache("report", log, "-o", file := tmp_path / f"{number}.html")
        assert done.code == 0, done.err
        page = Page(file.read_text(encoding="utf-8"))
        assert ("advice" in [each["id"] for each in page.all("section")]) == (length == 200)
    page = Page((tmp_path / "0.html").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", " ".join(page.text))
    lines = kvcache("advise", tmp_path / "log 0").out.splitlines()[2:]
    for line in filter(None, map(str.strip, lines)):
        topic, said = re.match(r"((?:\S+ )*\S+)(?:  +(.*))?$", line).groups()  # type: ignore[union-attr]
        assert topic in text
        assert said is None or said in text
    assert sum(line.lstrip().startswith("kvcache ") for line in lines) == len(page.all("code")) > 3


def test_what_the_service_reported(tmp_path: Path, kvcache: Kvcache) -> None:
    """The hours of `kvcache audit`, as a table and as lines; and in which cache the trace was played."""
    trace = tmp_path / "calls.jsonl"
    calls = [
        {"timestamp": 2e9 + 600 * at, "prompt_token_ids": [1] * (40 + at)}
        | {"usage": {"prompt_tokens_details": {"cached_tokens": 7 * at}}}
        for at in range(12)
    ]
    trace.write_text("".join(json.dumps(each) + "\n" for each in calls))
    options = ("--tokens-per-block", 4, "--primary-blocks", 50, "--secondary-blocks", 0)
    hours = json.loads(kvcache("audit", trace, *options, "--json").out)["reported"]["hours"]
    done = kvcache("report", trace, *options, "-o", tmp_path / "page.html")
    assert done.code == 0, done.err
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", " ".join(page.text))
    keys = ("requests", "prompt_tokens", "reported_tokens", "cached_tokens", "unlimited_tokens")
    for each in hours:
        assert f"+{each['hour']} h " + " ".join(f"{each[key]:,}" for key in keys) in text
    drawn = [line["y"] for line in page.data["charts"]["reported"]["data"]]
    parts = [[round(each[key] / each["prompt_tokens"], 5) for each in hours] for key in keys[2:]]
    assert drawn == parts
    assert len(hours) == 2
    assert "played through 50 + 0 blocks of 4 tokens, at the trace's own times." in text


class TestHarm:
    """Whatever a log holds, the page is what it was meant to be."""

    def test_names_are_text(self, nasty: Path) -> None:
        """Names that are markup, in the log's own name, in ids and adapters, make no tag and end no script."""
        html = report(nasty)
        page = Page(html)
        assert len(page.scripts) == 3 + 2
        assert page.all("img") == page.all("b") == []
        assert page.data["lanes-data"]["ids"] != []
        shown = [name.replace("\u2028", "\\u2028") for name in NASTY]
        assert set(page.data["lanes-data"]["ids"]) == set(shown)
        text = " ".join(page.text)
        assert all(name in text for name in shown)
        assert "<b>&nasty: KV cache report" in page.text
        ours = html.replace(page_module.plotly_js(), "")
        assert "alert(1)</script" not in ours
        assert "<img" not in ours
        assert any(NASTY[0] in line for line in page.explanations[0])

    def test_no_charts_text_is_markup_for_plotly(self, nasty: Path) -> None:
        """Of what a log names, charts have the names of tenants and sessions, without what makes markup."""
        charts = Page(report(nasty)).data["charts"]
        own = [charts.pop(f"groups-{by}") for by in ("tenant", "session")]
        names = [each["name"] for chart in own for each in chart["data"]]
        assert any("alert" in name for name in names)
        assert not set("".join(names)) & set("<>&")
        hover = {each.pop("hovertemplate") for chart in own for each in chart["data"] if each.pop("name")}
        assert hover == {"%{y:.1%}<extra>%{fullData.name}</extra>"}
        assert "alert" not in json.dumps([charts, own])

    def test_no_tokens_and_no_salts(self, nasty: Path) -> None:
        """No token id of the log, and no salt, is in what the page adds to its library."""
        ours = report(nasty).replace(page_module.plotly_js(), "")
        assert re.findall(r"987000\d\d\d|987,000,\d\d\d", ours) == []
        assert SALT not in ours
        assert hashlib.sha256(SALT.encode()).hexdigest() not in ours


class TestCommand:
    """The command writes a page, and no other file."""

    def test_it_needs_no_torch(self, busy: Path, tmp_path: Path, fork_python: RunPython) -> None:
        """It writes report.html where torch is not installed."""
        done = fork_python(
            "import sys; sys.modules['torch'] = None\n"
            "from kvcache.cli import main\n"
            f"sys.exit(main(['report', {str(busy)!r}, '-q', '-o', {str(tmp_path / 'report.html')!r}]))"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (tmp_path / "report.html").is_file()

    def test_it_writes_a_page(self, busy: Path, html: str, tmp_path: Path, kvcache: Kvcache) -> None:
        """The same as the library's; a note on stderr says how large it is."""
        done = kvcache("report", busy, "-o", tmp_path / "page.html")
        assert (done.code, done.out) == (0, "")
        assert re.fullmatch(rf"kvcache: {tmp_path}/page.html: \d.\d MiB\n", done.err)
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        for added in (r'<section id="advice".*?</section>\n', r'<li><a href="#advice">.*?</li>'):
            page = re.sub(added, "", page, flags=re.DOTALL)
        assert page == html

    def test_it_overwrites_nothing_unasked(self, busy: Path, tmp_path: Path, kvcache: Kvcache) -> None:
        """What exists stays as it is, a broken link as well, unless --force says otherwise."""
        kept = tmp_path / "kept.html"
        kept.write_text("<!doctype html> mine")
        done = kvcache("report", busy, "-o", kept)
        assert done.code == 2
        assert (
            done.err
            == f"kvcache: error: {kept} already exists: choose another path, or replace it with --force\n"
        )
        assert kept.read_text() == "<!doctype html> mine"
        (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
        assert kvcache("report", busy, "-o", tmp_path / "link.html").code == 2
        assert kvcache("report", busy, "-o", kept, "--force", "-q") == (0, "", "")
        assert kept.read_text().startswith("<!doctype html>")

    def test_it_overwrites_no_log(self, tmp_path: Path, kvcache: Kvcache) -> None:
        """Only pages are overwritten: a part of a log is none."""
        log = run_log(tmp_path / "log", "--primary-blocks", 120, "--limit", 2)
        [segment] = log.glob("*.kvlog")
        before = segment.read_bytes()
        done = kvcache("report", log, "-o", segment, "--force")
        assert (done.code, segment.read_bytes()) == (2, before)
        assert "choose another path" in done.err

    def test_missing_plotly(
        self, busy: Path, tmp_path: Path, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Says what to install, and writes nothing."""
        monkeypatch.setattr(page_module, "find_spec", lambda _: None)
        done = kvcache("report", busy, "-o", tmp_path / "page.html")
        assert done.code == 2
        assert done.err == "kvcache: error: a report requires plotly: pip install 'kvcache[report]'\n"
        assert not (tmp_path / "page.html").exists()

    def test_missing_log(self, tmp_path: Path, kvcache: Kvcache) -> None:
        """No page of a log that does not exist."""
        assert kvcache("report", tmp_path / "no", "-o", tmp_path / "page.html").code == 2
        assert list(tmp_path.iterdir()) == []


COST = {"mean_seconds": 0.25, "p95_seconds": 1.5, "gpu_hours": 2.0, "saved_gpu_hours": 3.0}
PREFILL = {"formula": "0 + 1 n + 0 n m", "currency": "EUR"}
CURVE = {
    "sizes": [
        {"blocks": 100, "hit_rate": 0.25, "best_hits": 60, "bytes": 3 << 20, "prefill": COST},
        {"blocks": 200, "hit_rate": 0.5, "best_hits": None, "bytes": None, "prefill": None},
    ],
    "prefill_model": PREFILL,
    "block_requests": 120,
    "num_blocks": {"primary": 100, "secondary": 100},
    "knee": 150,
    "timeouts": [{"seconds": 60, "hit_rate": 0.2}, {"seconds": None, "hit_rate": 0.6}],
}
WHATIF = {
    "log": "x",
    "recorded": {
        "hit_rate": 0.4,
        "policy": None,
        "config": {"primary_blocks": 100, "log": {"fsync": "never"}},
        "cache_bytes": {"primary": 1 << 30, "secondary": 2 << 30},
        "prefill": COST | {"saved_per_hour": 4.25},
    },
    "prefill_model": PREFILL,
    "trials": [
        {
            "hit_rate": 0.6,
            "policy": "lru",
            "of_bound": 0.9,
            "config": {"primary_blocks": 2000, "log": {"fsync": "never"}},
        }
    ],
}


SHADED = (
    "(() => { const cut = [...document.querySelectorAll('.wide')].filter((at) => at.scrollWidth > at.clientWidth);"
    " return cut.length ? getComputedStyle(cut[0]).backgroundImage.split('linear-gradient').length - 1 : 0; })()"
)
"""By how many gradients it is shown that a table is cut; 0: none is cut."""
PRICING = Pricing(PrefillModel(0.004, 6e-5, 2e-10), gpus=2, price=2.5, currency="<EUR>")
MODEL = KVShape("llama", "bfloat16", 32, 131_072)
LINE = AdviceLine("pin a prefix", "so much " * 30, "kvcache audit " + "log/" * 60 + " --by salt")
HOURS = [ReportedHour(hour, 10**6, 10**12, 10**11, 10**12, 10**10) for hour in range(5)]
SUPPLEMENTS = Supplements(
    [("played through", "4 + 0 blocks")], [("worth doing", [LINE] * 3)], ["size: " * 40], HOURS
)


def test_what_prefills_cost(busy: Path, page: Page) -> None:
    """The numbers are the audit's, of each reason, too; without a formula there is no such section."""
    totals = PrefillTotals(PRICING.model)
    audit = audit_batches(((batch, True) for batch in LogReader(busy)), totals)
    seconds, hours = totals.finish(), hours_between(audit.first_at, audit.last_at)
    cost = seconds.cost(PRICING, hours)
    html = report(busy, pricing=PRICING, model=MODEL)
    assert "<EUR>" not in html
    priced = Page(html)
    assert [each["id"] for each in priced.all("section")][1:3] == ["misses", "costs"]
    assert "costs" not in [each["id"] for each in page.all("section")]
    said = " ".join("".join(priced.text).split())
    assert cost.mean_seconds is not None
    assert cost.cost_per_hour is not None
    assert cost.saved_per_hour is not None
    for text in (
        f"time to prefill{duration(cost.mean_seconds)}",
        f"GPU-hours of prefills{few(cost.gpu_hours)}{few(cost.cost_per_hour)} <EUR> per hour",
        f"GPU-hours saved by reuse{few(cost.saved_gpu_hours)}{few(cost.saved_per_hour)} <EUR> per hour",
        f"GPU-hours lost{few(PRICING.gpu_hours(seconds.evicted))}to evictions; ",
        "primary160.0 MiB",
        "secondary40.0 MiB",
    ):
        assert text in said
    for reason in Reason:
        if audit.reasons[reason]:
            assert few(PRICING.gpu_hours(float(seconds.by_reason[reason]))) in priced.text


def test_memory_alone(busy: Path) -> None:
    """Bytes need no formula."""
    said = report(busy, model=MODEL)
    assert "160.0 MiB" in said
    assert "time to prefill" not in said


def test_a_log_that_is_not_whole(busy: Path, tmp_path: Path, kvcache: Kvcache) -> None:
    """A torn tail, and an epoch whose clock begins again, are told on the page; the first one on stderr, too."""
    log = run_log(tmp_path / "log", "--primary-blocks", 80, "--limit", 8)
    run_log(log, "--primary-blocks", 80, "--limit", 8, "--continue")
    segment = segments(log)[-1]
    segment.write_bytes(segment.read_bytes()[:-60])
    done = kvcache("report", log, "-o", tmp_path / "page.html")
    assert "the log is torn: the writer stopped inside a batch" in done.err
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    said = " ".join(page.text)
    assert "The log is torn: the writer stopped inside a batch" in said
    assert page.data["facts"]["end"] == "torn"
    found = read_report_data(log)
    [begins] = found.set_back
    assert f"The clock was set back in batch {begins:,}" in said
    times = [sample.at for sample in found.samples]
    assert times == sorted(times)
    assert "The log is " not in " ".join(Page(report(busy)).text)


def test_labels_of_sizes_do_not_meet() -> None:
    """However near sizes are to each other, each has its name at a height of its own."""
    sizes = [Size(100, 0.2), Size(110, 0.3)]
    curve = ImportedCurve(sizes=sizes, num_blocks={"primary": 100, "secondary": 10}, knee=104)
    layout = curve_by_size(curve)["layout"]
    heights = sorted(label["y"] for label in layout["annotations"])
    assert all(high - low >= 0.08 for low, high in itertools.pairwise(heights))
    assert max(heights) < 0.9
    assert len(layout["shapes"]) == 3


ODD: list[Any] = [
    None, True, -1, 0, 2**63, 10**400, -0.5, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "<b>", [], [[]],
    [None], {}, {"x": {"y": {}}}, {"": []}, [1, "x"], "9" * 5000,
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield (step,)
        yield from ((step, *rest) for rest in places(each))


class TestAlongside:
    """Sections for what other commands worked out."""

    def test_they_appear_if_given(self, busy: Path, tmp_path: Path, kvcache: Kvcache) -> None:
        """A curve as a chart and a table, tried settings as a table of what differs."""
        (tmp_path / "curve.json").write_text(json.dumps(CURVE))
        (tmp_path / "whatif.json").write_text(json.dumps(WHATIF))
        given = ["--curve", tmp_path / "curve.json", "--whatif", tmp_path / "whatif.json"]
        assert kvcache("report", busy, "-o", tmp_path / "page.html", "-q", *given).code == 0
        page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert [each["id"] for each in page.all("section")][-3:] == ["curve", "whatif", "requests"]
        hits, best = page.data["charts"]["curve"]["data"]
        assert (hits["x"], hits["y"], best["x"], best["y"]) == ([100, 200], [0.25, 0.5], [100], [0.5])
        timeouts = page.data["charts"]["timeouts"]
        assert [(each["x"], each["y"]) for each in timeouts["data"]] == [([60], [0.2])]
        assert timeouts["layout"]["shapes"][0]["y0"] == 0.6
        assert "without a timeout: 60.0 %." in page.text
        assert {"knee: 150 blocks; primary: 100 blocks; both levels: 200 blocks.", "2,000", "60.0 %"} <= set(
            page.text
        )
        assert "primary_blocks" in page.text
        costs = ("3.0 MiB", "250.0 ms", "1.50 s", "2.00", "3.00", "4.25", "1.0 GiB + 2.0 GiB", "EUR saved/h")
        assert set(costs) <= set(page.text)
        assert page.text.count("log.fsync") == 1, "only among the settings of the cache"

    def test_a_column_says_something(self, busy: Path) -> None:
        """Numbers that are 0 in all rows are left out, and so is the setting of what the rows are named by."""
        trials = [
            {
                "hit_rate": 0.5,
                "policy": name,
                "blocks_onboarded": 7,
                "config": {"eviction_policy": policy, "a": at},
            }
            for at, (name, policy) in enumerate((("lru", "lru"), ("lfu", "lru"), ("arc", "lru")))
        ]
        recorded = {"hit_rate": 0.4, "config": {"eviction_policy": "levels", "a": 9}}
        given = {"recorded": recorded, "trials": trials}
        assert headings(report(busy, whatif=given)) == ["cache", "a", "token hit rate", "onboarded"]
        trials[0] |= {"policy": None, "of_bound": 0.9, "preempted": 1, "too_long": 2}
        columns = [
            "eviction_policy",
            "a",
            "token hit rate",
            "of belady",
            "onboarded",
            "preempted",
            "too long",
        ]
        assert headings(report(busy, whatif=given)) == ["cache", *columns]

    def test_they_take_what_the_commands_print(self, busy: Path, tmp_path: Path, kvcache: Kvcache) -> None:
        """The JSON of both commands is understood, and their numbers are on the page."""
        curve = json.loads(kvcache("curve", busy, "--json").out)
        settings = ["--set", "primary_blocks=90,200", "--policy", "lru", "--jobs", 1]
        whatif = json.loads(kvcache("whatif", busy, *settings, "--json", "-q").out)
        page = Page(report(busy, curve=curve, whatif=whatif))
        [hits] = page.data["charts"]["curve"]["data"]
        assert hits["x"] == [size["blocks"] for size in curve["sizes"]]
        assert hits["y"] == [round(size["hit_rate"], 5) for size in curve["sizes"]]
        idle = page.data["charts"].get("timeouts", {"data": []})["data"]
        rates = [round(each["hit_rate"], 5) for each in curve["timeouts"][:-1]]
        assert [each["y"] for each in idle] == [rates] * bool(rates)
        assert len(whatif["trials"]) == 2
        for trial in (whatif["recorded"], *whatif["trials"]):
            assert f"{trial['computed_tokens']:,}" in page.text

    @pytest.mark.parametrize("option", ["curve", "whatif"])
    def test_other_data_is_refused(self, busy: Path, tmp_path: Path, kvcache: Kvcache, option: str) -> None:
        """What is not the other command's JSON, or no JSON at all, is an error that names what was expected."""
        good = {"curve": CURVE, "whatif": WHATIF}[option]
        rate = json.dumps(good).replace('"hit_rate": 0.', '"hit_rate": NaN, "x": 0.', 1)
        large = json.dumps(good).replace('"hit_rate": 0.', '"hit_rate": 1.', 1)
        deep = '{"trials": ' + "[" * 10**5
        file = tmp_path / "given.json"
        for text in ("{}", "[", "", "null", "[]", "3", '"text"', rate, large, deep, "\0", "{" * 5):
            file.write_text(text)
            done = kvcache("report", busy, "-o", tmp_path / "page.html", f"--{option}", file)
            assert (done.code, done.err.count("\n")) == (2, 1)
            said = f"kvcache: error: {file} is not the output of `kvcache {option} LOG --json`: "
            assert done.err.startswith(said)
        assert not (tmp_path / "page.html").exists()

    def test_another_log_is_refused(self, busy: Path, log: Path, tmp_path: Path, kvcache: Kvcache) -> None:
        """The figures of another log are not shown as this one's; those of a copy are its own."""
        curve, whatif = tmp_path / "curve.json", tmp_path / "whatif.json"
        curve.write_text(kvcache("curve", busy, "--json").out)
        whatif.write_text(kvcache("whatif", busy, "--no-bound", "--json", "-q").out)
        for option, file in (("curve", curve), ("whatif", whatif)):
            done = kvcache("report", log, "-o", tmp_path / "page.html", f"--{option}", file)
            assert (done.code, done.out) == (2, "")
            assert done.err == (
                f"kvcache: error: {file} is about another log: give the output of `kvcache {option} LOG --json` for "
                "this one\n"
            )
            with pytest.raises(UsageError, match=f"{option}= is about another log"):
                report(log, **{option: json.loads(file.read_text())})
        assert not (tmp_path / "page.html").exists()
        shutil.copytree(busy, tmp_path / "copy")
        given = ["--curve", curve, "--whatif", whatif]
        done = kvcache("report", tmp_path / "copy", "-o", tmp_path / "page.html", *given)
        assert (done.code, done.err.count("\n")) == (0, 1)

    def test_a_nameless_file_is_warned_of(self, busy: Path, tmp_path: Path, kvcache: Kvcache) -> None:
        """What does not say of which log it is may be right."""
        (tmp_path / "curve.json").write_text(json.dumps(CURVE))
        done = kvcache("report", busy, "-o", tmp_path / "page.html", "--curve", tmp_path / "curve.json")
        assert done.code == 0
        assert "warning" in done.err
        assert "does not name its log" in done.err

    @given(data=st.data())
    def test_odd_data_is_refused_or_drawn(self, data: st.DataObject) -> None:
        """Whatever stands in the place of a value: a typed error, or a section with JSON that browsers read."""
        good: dict[str, Any] = data.draw(st.sampled_from([CURVE, WHATIF]))
        changed = json.loads(json.dumps(good))
        at = data.draw(st.sampled_from(list(places(changed))))
        value = data.draw(st.sampled_from(ODD))
        owner: Any = changed
        for step in at[:-1]:
            owner = owner[step]
        owner[at[-1]] = value
        sections: Any = templates(HOME).get_template("sections.html").module
        try:
            if good is CURVE:
                curve = understood(changed, ImportedCurve, "x")
                drawn = [curve_by_size(curve), hit_rates_by_timeout(curve.timeouts)]
                json.dumps(drawn, allow_nan=False).encode()
                sections.curve(curve).encode()
            else:
                sections.whatif(understood(changed, WhatIf, "x")).encode()
        except UsageError:
            return

    def test_the_library_refuses_it_too(self, busy: Path) -> None:
        """With a typed error."""
        with pytest.raises(UsageError, match="sizes"):
            report(busy, curve={"sizes": 3})


@pytest.mark.needs("chromium")
class TestBrowser:
    """The page as people meet it."""

    def test_people_can_use_it(self, nasty: Path, html: str, tmp_path: Path) -> None:
        """It loads without errors or requests, and mouse and keys open explanations and evictions."""
        file, other = tmp_path / "page.html", tmp_path / "nasty.html"
        file.write_text(html, encoding="utf-8")
        other.write_text(report(nasty), encoding="utf-8")
        with Browser(program("chromium"), tmp_path / "profile") as browser:
            browser.size(1280, 900, dark=False)
            browser.open(other)
            assert drawn(browser)
            assert browser.eval("document.querySelectorAll('.lane').length") == len(NASTY)
            browser.open(file)
            assert drawn(browser)
            browser.eval("document.querySelector('.lane').click()")
            shown = browser.eval("document.querySelector('.explanation:not([hidden])').innerText")
            assert shown.startswith(Page(html).explanations[0][0].strip())
            press_keys(browser)
            search = "document.querySelector('#controls input')"
            browser.eval(f"{search}.value = 'nobody'; {search}.dispatchEvent(new Event('input'))")
            assert browser.eval("document.getElementById('shown').textContent") == (
                "No request's id contains “nobody”."
            )
            marker = "document.querySelector('[data-chart^=level] .scatterlayer .points path').getBoundingClientRect()"
            browser.eval("document.documentElement.style.scrollBehavior = 'auto'")
            browser.eval(f"scrollBy(0, {marker}.top - 300)")
            assert browser.click(marker, "document.activeElement.parentElement.id.startsWith('eviction-')")
            assert browser.eval("document.activeElement.parentElement.open")
            assert browser.errors == []
            assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data", "about"}

    @pytest.mark.parametrize("of_sessions", [False, True])
    def test_it_fits_every_window(
        self, busy: Path, agents: Path, tmp_path: Path, *, of_sessions: bool
    ) -> None:
        """Wide and narrow, light and dark: nothing sticks out, the colours follow the system, and paper is white."""
        file = tmp_path / "page.html"
        of_others = report(
            busy, curve=CURVE, whatif=WHATIF, pricing=PRICING, model=MODEL, supplements=SUPPLEMENTS
        )
        file.write_text(report(agents) if of_sessions else of_others, encoding="utf-8")
        with Browser(program("chromium"), tmp_path / "profile") as browser:
            for dark in (False, True):
                for width in (1280, 390):
                    browser.size(width, 900, dark=dark)
                    browser.open(file)
                    assert drawn(browser)
                    browser.eval(
                        "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
                    )
                    browser.eval("document.querySelector('.lane').click()")
                    assert browser.eval("document.documentElement.scrollWidth") == width
                    red = browser.eval(
                        "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
                    )
                    assert (red < 128) == dark
                    assert browser.eval(SHADED) == (2 if width == 390 else 0)
                    browser.screenshot(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
            browser.eval("document.getElementById('theme').click()")
            assert browser.eval("document.documentElement.dataset.theme") == "light"
            browser.print(tmp_path / "page.pdf")
            assert browser.errors == []
        assert (tmp_path / "page.pdf").stat().st_size > 10_000


def headings(html: str) -> list[str]:
    """The columns of the table of other settings."""
    section = html.partition('<section id="whatif"')[2].partition("</thead>")[0]
    return re.findall(r"<th[^>]*>([^<]*)</th>", section)


def drawn(browser: Browser) -> bool:
    """Whether all charts are there, after a moment."""
    return bool(
        browser.eval(
            "new Promise((done) => { let times = 0; const look = () => {"
            " const all = [...document.querySelectorAll('.chart')];"
            " if (all.every((each) => each.querySelector('.main-svg'))) done(true);"
            " else if (times++ > 200) done(false); else setTimeout(look, 50); }; look(); })"
        )
    )


def press_keys(browser: Browser) -> None:
    """Enter and Space open and close the second lane, Tab goes on to the third."""
    browser.eval("document.querySelectorAll('.lane')[1].focus()")
    state = "document.querySelectorAll('.lane')[1].getAttribute('aria-expanded')"
    browser.press("Enter", 13, "\r")
    assert browser.eval(state) == "true"
    browser.press(" ", 32, " ")
    assert browser.eval(state) == "false"
    browser.press("Tab", 9)
    assert browser.eval("document.activeElement === document.querySelectorAll('.lane')[2]")
    assert browser.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
