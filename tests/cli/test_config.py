"""`kvcache config`: what holds, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.config import KVCacheConfig
from kvcache.replay import replay
from tests.support.commands import TRACE, Kvcache

ENOUGH = ("--set", "max_sequence_length=64", "--set", "primary_blocks=4")


def test_origins(kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting is shown with its value and where that was given last."""
    file = tmp_path / "c.yaml"
    file.write_text("max_sequence_length: 128\nmax_tokens: 512\nhead_dim: 16\nlog: {fsync: never}\n")
    monkeypatch.setenv("KVCACHE_HEAD_DIM", "32")
    monkeypatch.setenv("KVCACHE_LOG__OVERFLOW", "block")
    done = kvcache(
        "config", "--config", file, "--set", "max_sequence_length=64", "--set", "max_attention_window=32,64"
    )
    shown = done.out.partition("\n\n")[0].splitlines()
    rows = {row[0]: row[1:] for row in (line.split() for line in shown)}
    assert done.code == 0
    assert rows["max_sequence_length"] == ["64", "--set"]
    assert rows["max_attention_window"] == ["32,64", "--set"]
    assert rows["max_tokens"] == ["512", "file"]
    assert rows["head_dim"] == ["32", "KVCACHE_HEAD_DIM"]
    assert rows["log.fsync"] == ["never", "file"]
    assert rows["log.overflow"] == ["block", "KVCACHE_LOG__OVERFLOW"]
    assert rows["log.record_tokens"] == ["true", "default"]
    assert rows["primary_blocks"] == ["none", "default"]


def test_windows_that_follow(kvcache: Kvcache) -> None:
    """Where nothing is missing, the blocks of each window are shown as a manager would have them."""
    several = ("--set", "max_attention_window=32,256", "--set", "primary_bytes=40960")
    done = kvcache("config", "--set", "max_sequence_length=256", *several)
    assert (done.code, done.err) == (0, "")
    rows = [line.split() for line in done.out.partition("\n\n")[2].splitlines()]
    # Half of the bytes for each: 32 tokens x K and V x 2 heads x 8 dims x 2 bytes = 2048 in a block.
    assert rows[1:] == [["32", "sliding", "1", "10", "0"], ["256", "full", "1", "10", "0"]]
    for given in ((), ("--set", "max_sequence_length=256", "--set", "free_gpu_memory_fraction=0.5")):
        assert "secondary blocks" not in kvcache("config", *given).out
    done = kvcache("config", "--set", "max_sequence_length=256", "--set", "primary_bytes=100")
    assert (done.code, "primary_bytes: given 100; accepted: at least" in done.err) == (2, True)


def test_json(kvcache: Kvcache, tmp_path: Path) -> None:
    """The JSON form is a configuration that can be used again."""
    done = kvcache("config", *ENOUGH, "--set", "log.segment_bytes=8192", "--json")
    config = KVCacheConfig(**json.loads(done.out))
    assert (config.max_sequence_length, config.primary_blocks, config.log.segment_bytes) == (64, 4, 8192)


def test_what_run_derives(kvcache: Kvcache) -> None:
    """What an engine has to give, or gets, is told with what `kvcache run` has instead; the JSON leaves it out."""
    done = kvcache("config")
    assert (done.code, done.err) == (0, "")
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in done.out.splitlines()}
    for name in ("max_sequence_length", "primary_blocks"):
        assert shown[name] == "(missing) required for an engine (from the requests in run)"
    assert shown["secondary_blocks"] == "none default (from the requests in run)"
    assert shown["tokens_per_block"] == "32 default (64 in run)"
    assert shown["log.overflow"] == "drop default (block in run)"
    found = json.loads(kvcache("config", "--json", "--set", "primary_blocks=3").out)
    assert {"max_sequence_length", "primary_blocks", "secondary_blocks"} & set(found) == {"primary_blocks"}
    assert (
        "  none       default (as many as primary in run)\n"
        in kvcache("config", "--set", "primary_blocks=3").out
    )


@pytest.mark.parametrize(
    "content", ["head_dim: 16\n", "max_tokens: 8192\n", "host_cache_size: 65536\n", "{}\n"]
)
def test_accepts_what_run_accepts(kvcache: Kvcache, tmp_path: Path, content: str) -> None:
    """A file that is good for `kvcache run` is good here, and what is shown as derived there is derived there."""
    file = tmp_path / "c.yaml"
    file.write_text(content)
    shown = kvcache("config", "--config", file, "--json")
    run = kvcache("run", TRACE, "--no-pools", "--config", file, "--log", tmp_path / "log")
    assert (shown.code, run.code) == (0, 0)
    created = replay(tmp_path / "log").state.created
    assert created is not None
    used = json.loads(created.config)
    own = {"tokens_per_block": 64, "log": used["log"]}
    assert {name: used[name] for name in json.loads(shown.out)} == json.loads(shown.out) | own


def test_problems_name_their_source(
    kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong setting is blamed on the file or the variable that gave it, and on no other."""
    file = tmp_path / "c.toml"
    file.write_text("head_dim = 'x'\nnum_layers = 'y'\n[log]\nfsync = 'z'\n")
    monkeypatch.setenv("KVCACHE_PRIMARY_BLOCKS", "abc")
    monkeypatch.setenv("KVCACHE_NUM_LAYERS", "0")
    for command in ("config", "run"):
        err = kvcache(command, "--config", file, "--set", "dtype=int3").err
        assert [line.removeprefix("kvcache: error: ").split(": given")[0] for line in err.splitlines()] == [
            "KVCACHE_NUM_LAYERS: num_layers",
            f"{file}: head_dim",
            "dtype",
            "KVCACHE_PRIMARY_BLOCKS: primary_blocks",
            f"{file}: log.fsync",
        ]


UNKNOWN = "KVCACHE_HEAD_DIMM (did you mean KVCACHE_HEAD_DIM?) is not a setting and is ignored"


@pytest.mark.parametrize("command", [("config",), ("run", TRACE, "--no-pools", "--limit", 3)])
def test_unknown_variable(
    kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """A variable that is no setting is told once, on stderr, without its value; -q keeps it quiet."""
    monkeypatch.setenv("KVCACHE_HEAD_DIMM", "se-cret")
    monkeypatch.setenv("KVCACHE_SERVICE_HOST", "10.0.0.1")
    done = kvcache(*command, "--json")
    assert (done.code, done.err.count("warning")) == (0, 1)
    assert f"kvcache: warning: {UNKNOWN}\n" in done.err
    assert isinstance(json.loads(done.out), dict)
    (line,) = (
        json.loads(line) for line in kvcache(*command, "--log-json").err.splitlines() if "HEAD_DIMM" in line
    )
    assert (line["event"], line["level"]) == (UNKNOWN, "warning")
    assert kvcache(*command, "-q").err == ""


def test_missing_file(kvcache: Kvcache) -> None:
    """A file that is not there is named once, without the system's number for it."""
    err = kvcache("config", "--config", "none.yaml").err
    assert err == "kvcache: error: none.yaml: cannot be read: No such file or directory\n"


def test_schema(kvcache: Kvcache) -> None:
    """The schema names every setting and refuses unknown ones."""
    schema = json.loads(kvcache("config", "--schema").out)
    assert set(schema["properties"]) == set(KVCacheConfig.model_fields)
    assert schema["additionalProperties"] is False


def test_none_takes_a_value_back(kvcache: Kvcache, monkeypatch: pytest.MonkeyPatch) -> None:
    """`none` unsets what may be missing, and is a value where it is one."""
    monkeypatch.setenv("KVCACHE_SECONDARY_BLOCKS", "9")
    found = json.loads(
        kvcache("config", *ENOUGH, "--set", "secondary_blocks=None", "--set", "block_hash=none", "--json").out
    )
    assert (found["secondary_blocks"], found["block_hash"]) == (None, "none")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("log.nope=1", "log.nope: no such field"),
        ("head_dimm=1", "head_dimm: no such field; did you mean head_dim?"),
        ("log=1", "log: given '1'; accepted: a mapping"),
        ("=1", "write FIELD=VALUE"),
        ("tokens_per_block=0", "tokens_per_block: given '0'; accepted: an integer from 1 to 2**30"),
    ],
)
def test_wrong_settings(kvcache: Kvcache, setting: str, says: str) -> None:
    """A setting that cannot be used is refused with what is accepted."""
    done = kvcache("config", *ENOUGH, "--set", setting)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_setting_inside_a_value(kvcache: Kvcache) -> None:
    """A setting cannot be a value and a group of settings."""
    done = kvcache("config", "--set", "head_dim=1", "--set", "head_dim.x=2")
    assert done.code == 2
    assert "head_dim has no nested settings" in done.err


def test_rules_for_stop_reasons(kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a file stay where the command line gives one by its reason; JSON in a variable is all of them."""
    file = tmp_path / "c.yaml"
    file.write_text("stop_retention: {stop: 20, length: {priority: 5, duration_ms: 1500}}\n")
    by_name = ("--set", "stop_retention.tool_calls=60:2min", "--set", "stop_retention.length=none")

    def shown(*args: object) -> str:
        done = kvcache("config", *ENOUGH, "--config", file, *args)
        assert done.code == 0, done.err
        return next(line for line in done.out.splitlines() if "stop_retention" in line)

    assert '{"stop": "20", "length": "5:1.5s"}' in shown()
    assert '{"stop": "20", "tool_calls": "60:120s"}' in shown(*by_name)
    monkeypatch.setenv("KVCACHE_STOP_RETENTION", '{"*": "60:10min", "end_turn": 40}')
    assert '{"*": "60:600s", "end_turn": "40"}' in shown()
    done = kvcache("config", *ENOUGH, "--set", "stop_retention.stop=101")
    assert (done.code, "stop_retention.stop.priority: given '101'; accepted: a priority" in done.err) == (
        2,
        True,
    )
