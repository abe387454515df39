"""The documentation says what is: its lists are complete, its examples run as they stand."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from events.feed.changes import Cleared, Created, Removed, Stored, Updated
from events.formats.trtllm import EventDicts
from events.formats.vllm import encode_batch
from events.types import (
    AllocateReason,
    AnyEvent,
    EndReason,
    GroupCreated,
    MoveReason,
    Namespace,
    RemoveReason,
    UpdateReason,
)
from kvcache import PrefixIndex, Recorder, Request, Retention, RetentionRange, errors
from kvcache.calls.scheduling import Scheduling, Simulation
from kvcache.calls.tables import BlockTables
from kvcache.cli.parser import COMMANDS
from kvcache.config import KVCacheConfig
from kvcache.manager import KVCacheManager
from kvcache.results import Demand
from kvcache.stats import RequestStats, Stats
from sinks import registry
from sinks.base import SinkContext
from sinks.brokers import BrokerOptions, NATSOptions, RedisOptions
from sinks.file import FileOptions
from sinks.router.feed import RouterFeed
from sinks.router.zmq import ZMQOptions
from sinks.stdout import StdoutOptions
from tests.support.columns import pack_i32
from tests.support.commands import Kvcache, Play
from tests.support.engines.life import IN_PRIMARY, IN_SECONDARY
from tests.support.engines.lives import occasion_name
from tests.support.examples import snippet
from tests.support.feeds.keys import Keys
from tests.support.feeds.life import LIFE
from tests.support.feeds.publisher import Publisher, batch, replaying, stored
from tests.support.feeds.workers import Worker
from tests.support.places import ROOT

API = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
EVENTS = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
WIRE = (ROOT / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
CURVE = (ROOT / "docs" / "how-to" / "curve.md").read_text(encoding="utf-8")
RECORDING = (ROOT / "docs" / "how-to" / "recording.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table behind a heading, by the text of their first cell."""
    lines = text.partition(heading)[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = {}
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip().replace("`", "") for cell in line.strip("|").split(" | "))
        rows[first] = cells
    return rows


def spelled(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return '""' if value == "" else str(value)


def defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """All settings with their defaults, as the documentation writes them."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from defaults(kind, f"{name}.")
        else:
            yield prefix + name, "required" if field.is_required() else spelled(field.default)


def meanings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What the schema says about all settings."""
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from meanings(kind, f"{name}.")
        else:
            yield prefix + name, properties[name]["description"].partition(" Accepted: ")[0].replace("`", "")


def test_every_setting_is_documented() -> None:
    """The table of settings has each one, in order, with its default and what the schema says it means."""
    rows = table(SETTINGS, "## All settings")
    assert [(name, row[0]) for name, row in rows.items()] == list(defaults(KVCacheConfig))
    assert {name: row[1].partition(" One of ")[0] for name, row in rows.items()} == dict(
        meanings(KVCacheConfig)
    )


@pytest.mark.parametrize(
    ("heading", "options"),
    [("**`stdout:`**", StdoutOptions), ("**`file:///", FileOptions), ("**`zmq+pub:", ZMQOptions)],
)
def test_every_option_of_a_sink_is_documented(heading: str, options: type[msgspec.Struct]) -> None:
    """The table of each sink has each option of its URL with its default."""
    declared = {field.name: spelled(field.default) for field in msgspec.structs.fields(options)}
    assert {name: row[0] for name, row in table(SETTINGS, heading).items()} == declared


TRTLLM = (ROOT / "docs" / "how-to" / "trtllm.md").read_text(encoding="utf-8")


THEIRS = """
enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction max_gpu_total_bytes
host_cache_size disk_cache_size disk_cache_path onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority
event_buffer_max_size attention_dp_events_gather_period_ms kv_events_config kv_cache_event_hash_algo
enable_partial_reuse copy_on_partial_reuse use_uvm tokens_per_block dtype iteration_stats_interval
use_kv_cache_manager_v2 enable_swa_scratch_reuse pool_ratio avg_seq_len max_util_for_resume block_reuse_config
mamba_state_cache_interval enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm max_queue_size
topic token_range_retention_configs token_start token_end priority duration_ms decode_retention_priority
decode_duration_ms transfer_mode directory
"""
"""Options of TensorRT-LLM's `KvCacheConfig`, `KVEventsConfig` and `KvCacheRetentionConfig`."""


def names_of_ours() -> set[str]:
    """All that a caller may give or ask."""
    fields = (Request, Retention, RetentionRange, Demand, Stats, RequestStats)
    parameters = inspect.signature(KVCacheManager).parameters
    return {
        *KVCacheConfig.model_fields,
        *dir(KVCacheManager),
        *parameters,
        *(name for kind in (*fields, Simulation) for name in dir(kind)),
        *(field.name for field in msgspec.structs.fields(ZMQOptions)),
        "kv_events_sink",
    }


def test_what_users_of_tensorrt_llm_are_reported_to_use_exists() -> None:
    """Each name in the second column of the tables, and each of its options has its line."""
    rows = [line.strip("| ").split(" | ") for line in TRTLLM.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])} - {"False"}
    assert len(named) > 60
    assert named <= names_of_ours()
    assert all(len(row) in (2, 3) for row in rows)
    options = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    assert set(THEIRS.split()) <= options


BROKERS = (ROOT / "docs" / "how-to" / "brokers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "options"),
    [("Of NATS", NATSOptions), ("Of Redis", RedisOptions), ("Of all three", BrokerOptions)],
)
def test_every_option_of_a_broker_is_documented(heading: str, options: type[msgspec.Struct]) -> None:
    """The table of what all brokers have, and that of each, have each option with its default."""
    common = table(BROKERS, "Of all three")
    rows = common if options is BrokerOptions else common | table(BROKERS, heading)
    declared = {field.name: spelled(field.default) for field in msgspec.structs.fields(options)}
    assert {name: row[0] for name, row in rows.items()} == declared


# Directories whose modules are listed one by one, and not as one noun.
PACKAGES = ("events", "sinks", "cuda_ops", "kvcache")
ROOM_FOR = 12
"""Modules beside each other in a package's root."""


def listing(package: str) -> list[str]:
    """The modules in a package's root, and its rooms, which end in a slash."""
    home = ROOT / package
    modules = [path.stem for path in home.glob("*.py") if not path.name.startswith("_")]
    return modules + [f"{path.parent.name}/" for path in home.glob("*/__init__.py")]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_room_is_in_the_architecture(package: str) -> None:
    """The table of each package has exactly what its listing has, and the root of none is crowded."""
    rows = table(ARCHITECTURE, f"Inside `{package}`")
    there = listing(package)
    assert sorted(name for names in rows for name in names.split(", ")) == sorted(there)
    assert sum(not name.endswith("/") for name in there) <= ROOM_FOR


def state_diagram(life: Any) -> str:
    """A table of states, events and states that may follow, for Mermaid; what leaves a state as it is is not drawn."""
    lines = ["stateDiagram-v2"]
    for state in life:
        spelled = state.name.lower().replace("_in_", ", in ")
        lines.append(f'    state "{spelled.replace("_", " ")}" as {state.name}')
    lines.append(f"    [*] --> {next(iter(life)).name}")
    for state, row in life.items():
        for after in life:
            names = [occasion_name(occasion) for occasion, follow in row.items() if after in follow]
            if names and after != state:
                lines.append(f"    {state.name} --> {after.name} : {', '.join(names)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("marker", "life"), [("primary", IN_PRIMARY), ("secondary", IN_SECONDARY), ("feed", LIFE)]
)
def test_the_life_of_a_block_is_drawn_as_it_is(marker: str, life: Any) -> None:
    """The diagrams are what the tables make; where one is stale, put what is expected between its markers."""
    drawn = re.search(
        rf"<!-- life: {marker} -->\n```mermaid\n(.*?)```\n<!-- end -->", ARCHITECTURE, re.DOTALL
    )
    assert drawn is not None
    assert drawn[1] == state_diagram(life)


def test_every_event_is_in_its_table() -> None:
    """The table has each event of the union, in order, with what its docstring says and all fields by their names."""
    rows = table(EVENTS, "# Events")
    assert list(rows) == [event.__name__ for event in typing.get_args(AnyEvent)]
    for event in typing.get_args(AnyEvent):
        said, fields = rows[event.__name__]
        assert said.startswith((event.__doc__ or "").partition("\n\n")[0].replace("`", ""))
        assert fields.split(", ") == list(event.__struct_fields__)


def test_every_reason_is_in_the_legend() -> None:
    """The legend of the lines for people names each value of why=."""
    [row] = table(EVENTS, "## Lines for people")["why="]
    for reason in (*AllocateReason, *MoveReason, *RemoveReason, *UpdateReason, *EndReason):
        assert re.search(rf"\b{reason}\b", row), reason


def test_the_changelog_reports_what_users_meet() -> None:
    """Every command, every scheme of a sink, and the options and calls that stand for a feature of their own."""
    schemes = [f"{scheme}:" for scheme in registry._BUILT_IN]
    features = ["set_priority", "multimodal=", "extra_ids=", "resume", "get_latest_events"]
    options = ["--log-json", "--wait-subscribers", "--hold"]
    assert [each for each in [*COMMANDS, *schemes, *features, *options] if each not in CHANGELOG] == []


LLMS = ROOT / "docs" / "llms.txt"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[bet]*/**/README.md"), LLMS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    """Each relative link of a page leads to a file or directory of the project."""
    links = re.findall(r"\]\(((?!\w+:|#)[^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_llms_txt_has_its_form() -> None:
    """A title, a quoted summary, and sections whose every line begins with a link; all tutorials are named."""
    title, *sections = re.split(r"^## ", LLMS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.match(r"# kvcache\n\n> ", title)
    rows = [line for section in sections for line in section.splitlines()[1:] if line]
    assert all(re.match(r"- \[[^\]]+\]\([^)]+\.md\)", line) for line in rows)
    named = set(re.findall(r"\(([\w/-]+\.md)\)", LLMS.read_text(encoding="utf-8")))
    tutorials = {f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md")}
    assert tutorials <= named


def test_every_oracle_is_on_its_page() -> None:
    """The first table of the page has exactly the modules of the directory."""
    page = (ROOT / "tests" / "oracles" / "README.md").read_text(encoding="utf-8")
    named = {
        name for row in table(page, "## In this directory") for name in re.findall(r"\((\w+\.py)\)", row)
    }
    assert named == {path.name for path in (ROOT / "tests" / "oracles").glob("*.py")}


def test_how_long_the_tests_take_is_said_once() -> None:
    """`make help` promises what the README promises."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    promise = re.search(r"the tests: (.* on two cores)", README)
    assert promise is not None
    assert f"the tests: {promise[1]}'" in makefile


def test_example_of_the_prefix_index_runs(play: Play, tmp_path: Path) -> None:
    """The example for routers runs as it stands, and what it saves can be loaded."""
    done = play(
        snippet(WIRE, "python", "PrefixIndex").replace('"index.kvprefix"', repr(str(tmp_path / "it")))
    )
    assert (done.out, done.err) == ("worker-1 0 32 tokens\nworker-2 0 48 tokens\n", "")
    assert len(PrefixIndex.load(tmp_path / "it").publishers) == 2


def test_every_call_of_the_prefix_index_is_documented() -> None:
    """The table has exactly its public methods and properties."""
    rows = table(WIRE, "## Who has a prompt's prefix")
    calls = {name for row in rows for name in re.findall(r"(?:^|, |\.)(\w+)", re.sub(r"\(.*?\)", "", row))}
    assert calls - {"PrefixIndex"} == {name for name in dir(PrefixIndex) if not name.startswith("_")}


def test_every_call_is_in_the_api() -> None:
    """The table of calls has exactly the public methods and properties of the manager, each with a sentence."""
    lines = API.partition("## All calls")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if re.match(r"\| .*`", line)][1:]
    calls = [re.findall(r"[\w.]+", row[1])[0] for row in rows]
    parts = {"": KVCacheManager, "tables.": BlockTables, "scheduling.": Scheduling}
    public = {part + name for part, kind in parts.items() for name in dir(kind) if not name.startswith("_")}
    internal = {"tables.of_admission", "tables.one", "tables.several"}
    assert sorted(calls) == sorted(["KVCacheManager", *(public - internal)])
    assert all(row[2].strip().endswith(".") for row in rows)


def test_every_call_of_a_recorder_is_documented() -> None:
    """The table has exactly its public methods, and what else a recorder has."""
    rows = table(RECORDING, "## All calls")
    calls = {name for row in rows for name in re.findall(r"(\w+)(?:\(.*?\))?(?:, |$)", row)}
    public = {name for name in dir(Recorder) if not name.startswith("_")}
    assert calls == {"Recorder", "state", "bus", "config", "engine", *public}
    for name, row in rows.items():
        call, _, arguments = name.partition("(")
        if arguments and "," not in name.partition(")")[2]:
            given = re.findall(r"\w+", arguments)
            assert set(given) <= set(inspect.signature(getattr(Recorder, call, Recorder)).parameters), name
        assert row[0]


def test_the_engine_on_the_page_is_recorded(play: Play, tmp_path: Path) -> None:
    """The example runs as it stands, and `explain` says of its log what stands below it, but for times."""
    log = str(tmp_path / "log")
    assert play(snippet(RECORDING, "python", "Recorder").replace('"my-log"', repr(log))) == (0, "", "")
    reported = play(f"from kvcache.cli import main; main(['explain', {log!r}, '--request', 'second'])").out
    times = re.compile(r"\+\d+\.\d{3}s")
    assert times.sub("", reported) == times.sub(
        "", RECORDING.partition("--request second\n")[2].partition("```")[0]
    )


def test_every_error_is_in_the_api() -> None:
    """The page names each error under its kind."""
    tree = API.partition("## Errors")[2]
    kinds = dict(re.findall(r"^- `(\w+)`:(.*(?:\n  .*)*)", tree, re.MULTILINE))
    assert set(kinds) == {kind.__name__ for kind in errors.KVCacheError.__subclasses__()}
    for kind, text in kinds.items():
        declared = {
            error.__name__
            for error in getattr(errors, kind).__subclasses__()
            if error.__module__ == errors.__name__
        }
        assert declared <= set(re.findall(r"`(\w+)`", text))


def test_curve_example_runs(play: Play) -> None:
    """The example of the page is a program that runs, and its numbers are right."""
    assert play(snippet(CURVE, "python", "measure(")) == (0, "", "")


def test_sink_of_ones_own(tmp_path: Path, kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of a sink is found by its entry point and gets the events of a run."""
    site = tmp_path / "site"
    info = site / "counting-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "counting.py").write_text(snippet(SETTINGS, "python", "def create"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    [(group, entries)] = tomllib.loads(snippet(SETTINGS, "toml", "entry-points"))["project"][
        "entry-points"
    ].items()
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    monkeypatch.syspath_prepend(site)
    done = kvcache("run", "--no-pools", "--limit", 2, "-q", "--sink", "count:")
    assert "'SequenceAdded': 2" in done.err
    assert "sinks            count:" in done.out


def test_the_wire_is_as_described() -> None:
    """Each event in docs/reference/wire.md is what is sent for such a change."""
    blocks = WIRE.partition("## TensorRT-LLM's dicts")[0]
    reported = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", blocks, re.DOTALL)]
    names = b"".join(number.to_bytes(8, "big") for number in reported[0]["block_hashes"])
    stored = Stored(0, 0, names, b"", pack_i32(reported[0]["token_ids"]), 4, Namespace())
    removed = Removed(0, 1, names[8:] + names[:8])
    ts, events, rank = msgspec.msgpack.decode(encode_batch([stored, removed, Cleared()], 1.5, 3))
    assert (ts, rank) == (1.5, 3)
    assert events == reported
    assert [list(event) for event in events] == [list(event) for event in reported]


def test_example_of_a_dict_is_what_is_written() -> None:
    """The line in docs/reference/wire.md is written for such a change."""
    said = json.loads(snippet(WIRE, "json", "event_id"))
    group = GroupCreated(16, "full", (0,), (), (8, 2))
    moved = Updated(0, said["data"]["block_hash"].to_bytes(8, "big"), level=(0, 1))
    created = Created((group,), "v1_block_key")
    lines = b"".join(EventDicts().lines([created, moved, moved, moved])).splitlines()
    assert json.loads(lines[3]) == said


def test_examples_that_read_files_run(play: Play, tmp_path: Path) -> None:
    """Those of frames and of TensorRT-LLM's dicts, on files that sinks have written."""
    urls = [f"file:{tmp_path}/e.msgpack?format=msgpack", f"file:{tmp_path}/e.jsonl?format=trtllm"]
    with KVCacheManager(KVCacheConfig(max_sequence_length=64, primary_blocks=8), sinks=urls) as manager:
        manager.add_sequence(1, [5] * 40)
        manager.store_context_blocks(1, 40)
    frames = snippet(EVENTS, "python", "kvevent").replace("events.msgpack", f"{tmp_path}/e.msgpack")
    done = play(frames)
    assert done.err == ""
    assert done.out.startswith("0 ['CacheCreated'")
    assert "BlocksStored" in done.out
    done = play(snippet(WIRE, "python", "DictFollower").replace("events.jsonl", f"{tmp_path}/e.jsonl"))
    assert (done.out, done.err) == (f"{40 // manager.config.tokens_per_block} blocks on the GPU\n", "")


LIVE, OTHER = "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"


def printed(code: str, lines: int) -> list[str]:
    """The first lines that a program prints which does not end by itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            assert process.stdout is not None
            return [process.stdout.readline().rstrip() for _ in range(lines)]
        finally:
            process.kill()


def test_the_reader_on_the_page_runs() -> None:
    """The example of a subscriber follows a publisher from its replay on, and says what is lost."""
    code = snippet(WIRE, "python", "Missed, Subscriber")
    with Publisher() as publisher, replaying({1: batch(stored(1, 2))}) as server:
        reported = printed(code.replace(LIVE, publisher.endpoint).replace(OTHER, server.endpoint), 3)
    assert reported == ["batches 0 to 0 are lost: not received", "0 blocks on the GPU", "2 blocks on the GPU"]


def test_the_encrypted_reader_on_the_page_runs(tmp_path: Path) -> None:
    """The example with keys hears what a feed with keys sends to those on its list."""
    keys = Keys(tmp_path)
    keys.make("feed", "router")
    keys.allow("router")
    code = snippet(WIRE, "python", "Curve.read")
    for file in ("router.key_secret", "feed.key"):
        assert file in code
        code = code.replace(file, str(tmp_path / file))
    url = f"zmq+pub://127.0.0.1:0?coalesce=0&curve_key={keys.secret('feed')}&curve_clients={keys.clients}"
    sink = registry.open_sink(url, SinkContext(32, 4))
    assert isinstance(sink, RouterFeed)
    with Worker(feed=sink) as worker:
        worker.put(worker.source.store(1, 3))
        worker.settle()
        assert printed(code.replace(LIVE, worker.transport.endpoint), 1) == ["3 blocks on the GPU"]


def test_the_asynchronous_reader_on_the_page_runs() -> None:
    """The example for asyncio follows two publishers at once."""
    code = snippet(WIRE, "python", "AsyncSubscriber")
    with Publisher() as one, Publisher() as two, ThreadPoolExecutor(1) as pool:
        lines = pool.submit(printed, code.replace(LIVE, one.endpoint).replace(OTHER, two.endpoint), 2)
        for number, publisher in enumerate((one, two), 1):
            publisher.wait_subscribed()
            publisher.send(0, batch(stored(*range(number))))
        reported = lines.result(60)
    assert sorted(reported) == sorted(
        [f"{one.endpoint}: 1 blocks on the GPU", f"{two.endpoint}: 2 blocks on the GPU"]
    )
