"""Settings: what is accepted, what an error says, and how file, environment and code are put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcache.config import _HERE, KVCacheConfig, LogConfig, closest
from kvcache.errors import ConfigError
from tests.support.commands import RunPython


def config(**settings: Any) -> KVCacheConfig:
    """A small configuration, but for the settings given."""
    return KVCacheConfig(**{"max_sequence_length": 64, "primary_blocks": 8, **settings})


def problems(**settings: Any) -> tuple[str, ...]:
    """The problems of settings that must be refused."""
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return caught.value.problems


class TestFields:
    def test_minimal(self) -> None:
        """The longest sequence and one limit of the primary pool are enough."""
        assert KVCacheConfig(max_sequence_length=64, max_tokens=64).tokens_per_block == 32

    def test_frozen(self) -> None:
        """A configuration cannot be changed after it was checked."""
        with pytest.raises(ValidationError, match="frozen"):
            config().head_dim = 3  # type: ignore[misc]

    def test_json_round_trip(self) -> None:
        """The JSON that the log records gives the same configuration back."""
        full = config(num_kv_heads=(1, 2), max_attention_window=[32, 64], log={"fsync": "never"}, model="m")
        assert KVCacheConfig.model_validate_json(full.model_dump_json()) == full

    @pytest.mark.parametrize("size", [1, 2, 3, 64, 528, 1 << 20])
    def test_block_sizes(self, size: int) -> None:
        """Blocks may have any number of tokens, 1 included."""
        assert config(tokens_per_block=size).tokens_per_block == size

    @pytest.mark.parametrize("heads", [3, (1, 2)])
    def test_heads_for_all_layers_or_for_each(self, heads: object) -> None:
        """The number of KV heads is one number, or one per layer."""
        assert config(num_kv_heads=heads).num_kv_heads == heads

    def test_hash_none_is_a_value(self) -> None:
        """The string "none" turns naming off; it is not the absence of a setting."""
        assert config(block_hash="none").block_hash == "none"


class TestProblems:
    @pytest.mark.parametrize(
        ("settings", "line"),
        [
            ({"tokens_per_block": 0}, "tokens_per_block: given 0; accepted: an integer from 1 to 2**30"),
            (
                {"tokens_per_block": 2**30 + 1},
                f"tokens_per_block: given {2**30 + 1}; accepted: an integer from 1 to 2**30",
            ),
            ({"head_dim": "x"}, "head_dim: given 'x'; accepted: an integer from 1 to 2147483647"),
            ({"head_dim": True}, "head_dim: given True; accepted: an integer from 1 to 2147483647"),
            (
                {"dtype": "fp4"},
                "dtype: given 'fp4'; accepted: float16, bfloat16, float32, float8_e4m3fn or int8",
            ),
            ({"kv_layout": "nhd"}, "kv_layout: given 'nhd'; accepted: NHD or HND"),
            ({"model": 3}, "model: given 3; accepted: text"),
            ({"model": "\udcff"}, r"model: given '\udcff'; accepted: text"),
            ({"num_layers": 65537}, "num_layers: given 65537; accepted: an integer from 1 to 65536"),
            (
                {"event_buffer_max_size": 2**31},
                "event_buffer_max_size: given 2147483648; accepted: an integer from 0 to 2147483647",
            ),
            (
                {"host_cache_size": 2**62 + 1},
                f"host_cache_size: given {2**62 + 1}; accepted: bytes, from 0 to 2**62, also as 64GiB, or none",
            ),
            (
                {"max_tokens": 2**62 + 1},
                f"max_tokens: given {2**62 + 1}; accepted: tokens, from tokens_per_block to 2**62, or none",
            ),
            (
                {"log": {"segment_bytes": 2**62 + 1}},
                f"log.segment_bytes: given {2**62 + 1}; accepted: bytes, from 4096 to 2**62, also as 64MiB",
            ),
            (
                {"log": {1: 2}},
                f"log: given {{1: 2}}; accepted: a mapping of {', '.join(LogConfig.model_fields)}",
            ),
            (
                {"head_dim": 1 << 20_000},
                "head_dim: given a value of type int; accepted: an integer from 1 to 2147483647",
            ),
            (
                {"primary_blocks": 2**31},
                (
                    "primary_blocks: given 2147483648; "
                    "accepted: an integer from 1 to 2147483647, one such integer per window, or none"
                ),
            ),
            (
                {"secondary_offload_min_priority": 101},
                "secondary_offload_min_priority: given 101; accepted: a priority from 0 to 100",
            ),
            (
                {"num_kv_heads": (2, 0)},
                "num_kv_heads: given (2, 0); accepted: an integer from 1 to 2147483647, or one such integer per layer",
            ),
            (
                {"max_attention_window": []},
                (
                    "max_attention_window: given []; accepted: windows in tokens, from 1 on "
                    "(full: max_sequence_length or more), one per layer or fewer, or none"
                ),
            ),
            ({"kv_factor": 3}, "kv_factor: given 3; accepted: 2 or 1"),
            (
                {"window_shares": "fair"},
                "window_shares: given 'fair'; accepted: equal, window, or one number above 0 per window",
            ),
            (
                {"free_gpu_memory_fraction": 1},
                "free_gpu_memory_fraction: given 1; accepted: a number above 0 and below 1, or none",
            ),
            ({"log": {"fsync": "no"}}, "log.fsync: given 'no'; accepted: always, group, interval or never"),
            (
                {"log": "file"},
                f"log: given 'file'; accepted: a mapping of {', '.join(LogConfig.model_fields)}",
            ),
            ({"token_per_block": 3}, "token_per_block: no such field; did you mean tokens_per_block?"),
            ({"block_size": 16}, "block_size: no such field; did you mean tokens_per_block?"),
            ({"max-model-len": 16}, "max-model-len: no such field; did you mean max_sequence_length?"),
            ({"num_gpu_blocks": 16}, "num_gpu_blocks: no such field; did you mean primary_blocks?"),
            ({"kv_block_size": 16}, "kv_block_size: no such field; did you mean tokens_per_block?"),
            ({"hicache_ratio": 2}, "hicache_ratio: no such field; did you mean host_cache_size?"),
            ({"num_attention_heads": 8}, "num_attention_heads: no such field; did you mean num_kv_heads?"),
            ({"retain_bytes": 1}, "retain_bytes: no such field; did you mean log.retain_bytes?"),
            ({"log": {"record_token": 1}}, "log.record_token: no such field; did you mean record_tokens?"),
            ({"num_kv_heads": (1, 2, 3)}, "num_kv_heads: given 3 numbers; accepted: one, or 2 (num_layers)"),
            (
                {"max_attention_window": (1, 2, 3)},
                "max_attention_window: given 3 windows; accepted: at most 2 (num_layers)",
            ),
            ({"max_tokens": 31}, "max_tokens: given 31; accepted: at least one block of 32 tokens"),
            (
                {"primary_blocks": None},
                (
                    "primary_blocks, max_tokens, primary_bytes, free_gpu_memory_fraction: missing; "
                    "accepted: one or more of them"
                ),
            ),
        ],
    )
    def test_one_line_says_field_given_and_accepted(self, settings: dict[str, Any], line: str) -> None:
        """A problem is one line with the field, what was given and what is accepted."""
        assert problems(**settings) == (line,)

    def test_missing_field(self) -> None:
        """The one mandatory setting is asked for by name."""
        with pytest.raises(ConfigError) as caught:
            KVCacheConfig(primary_blocks=1)  # type: ignore[call-arg]
        assert caught.value.problems == (
            "max_sequence_length: missing; accepted: an integer from 1 to 2147483647",
        )

    def test_all_problems_at_once(self) -> None:
        """Whoever makes three mistakes reads of three, not of the first."""
        found = problems(head_dim=0, kv_layout="x", log={"fsync": "x", "overflow": "y"})
        assert [line.split(":")[0] for line in found] == [
            "head_dim",
            "kv_layout",
            "log.overflow",
            "log.fsync",
        ]

    def test_nothing_alike_lists_all(self) -> None:
        """An unknown field that resembles none is answered with the names that there are."""
        (line,) = problems(log={"zzz": 1})
        assert line == "log.zzz: no such field; known fields: " + ", ".join(LogConfig.model_fields)

    def test_long_values_are_cut(self) -> None:
        """A value is quoted, but not at any length."""
        (line,) = problems(dtype="x" * 10_000)
        assert len(line) < 200

    def test_nested_references_are_quoted_in_part(self) -> None:
        """A value that a few references make endless is quoted as far as it is shown, at once."""
        value: list[Any] = [1] * 10
        for _ in range(30):
            value = [value] * 10
        (line,) = problems(primary_blocks=value)
        assert len(line) < 200

    def test_a_setting_may_be_called_anything(self) -> None:
        """A wrong field is a wrong field, also where Python means something by its name."""
        (line,) = problems(self=3)
        assert line.startswith("self: no such field")

    def test_log_alone(self) -> None:
        """The part for the log raises the same kind of error when it is made alone."""
        with pytest.raises(ConfigError, match="fsync: given 'x'; accepted: always, group, interval or never"):
            LogConfig(fsync="x")  # type: ignore[arg-type]


class TestLoad:
    TOML = 'max_sequence_length = 64\nprimary_blocks = 8\nmodel = "file"\n[log]\nfsync = "never"\n'
    YAML = "max_sequence_length: 64\nprimary_blocks: 8\nmodel: file\nlog:\n  fsync: never\n"

    @pytest.fixture
    def toml(self, tmp_path: Path) -> Path:
        path = tmp_path / "cache.toml"
        path.write_text(self.TOML)
        return path

    @pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML)])
    def test_file(self, tmp_path: Path, suffix: str, text: str) -> None:
        """TOML and YAML files say the same."""
        path = tmp_path / f"cache{suffix}"
        path.write_text(text)
        assert KVCacheConfig.load(path, env={}) == config(model="file", log={"fsync": "never"})

    def test_environment_wins_over_file_and_code_over_both(self, toml: Path) -> None:
        """Each source fills what it names and leaves the rest to the one below, inside `log` too."""
        env = {"KVCACHE_MODEL": "env", "KVCACHE_HEAD_DIM": "16", "KVCACHE_LOG__RECORD_TOKENS": "false"}
        loaded = KVCacheConfig.load(toml, env=env, head_dim=32, log={"overflow": "block"})
        log = {"fsync": "never", "record_tokens": False, "overflow": "block"}
        assert loaded == config(model="env", head_dim=32, log=log)

    def test_process_environment_is_the_default(self, toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without `env` the process's variables are read."""
        monkeypatch.setenv("KVCACHE_HEAD_DIM", "128")
        assert KVCacheConfig.load(toml).head_dim == 128

    @pytest.mark.parametrize("text", ["32,64", "[32, 64]", " 32 , 64 "])
    def test_lists_in_the_environment(self, toml: Path, text: str) -> None:
        """A variable holds a list as numbers with commas, with or without brackets."""
        env = {"KVCACHE_MAX_ATTENTION_WINDOW": text, "KVCACHE_NUM_KV_HEADS": "1,2"}
        loaded = KVCacheConfig.load(toml, env=env)
        assert (loaded.max_attention_window, loaded.num_kv_heads) == ((32, 64), (1, 2))

    def test_shares_in_the_environment(self, toml: Path) -> None:
        """Shares are numbers with commas, or the name of a rule; block counts are numbers, one or per window."""
        env = {"KVCACHE_MAX_ATTENTION_WINDOW": "32,64", "KVCACHE_PRIMARY_BLOCKS": "3, 4"}
        loaded = KVCacheConfig.load(toml, env=env | {"KVCACHE_WINDOW_SHARES": "[1, 0.5]"})
        assert (loaded.primary_blocks, loaded.window_shares) == ((3, 4), (1.0, 0.5))
        assert KVCacheConfig.load(toml, env={"KVCACHE_WINDOW_SHARES": "window"}).window_shares == "window"
        assert KVCacheConfig.load(toml, env={"KVCACHE_WINDOW_SHARES": "2"}).window_shares == (2.0,)

    def test_one_number_in_the_environment(self, toml: Path) -> None:
        """One number is the window, or the heads, of all layers."""
        loaded = KVCacheConfig.load(
            toml, env={"KVCACHE_MAX_ATTENTION_WINDOW": "32", "KVCACHE_NUM_KV_HEADS": "4"}
        )
        assert (loaded.max_attention_window, loaded.num_kv_heads) == ((32,), 4)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1MiB", 1 << 20),
            ("1.5KiB", 1536),
            ("80GB", 80 * 10**9),
            ("0.3KB", 300),
            ("4194304TiB", 1 << 62),
            ("7B", 7),
            ("1048576", 1 << 20),
        ],
    )
    def test_bytes_with_a_unit(self, toml: Path, text: str, value: int) -> None:
        """A size is a number of bytes wherever it is given, exactly."""
        assert KVCacheConfig.load(toml, env={"KVCACHE_PRIMARY_BYTES": text}).primary_bytes == value
        assert KVCacheConfig.load(toml, env={}, host_cache_size=f" {text} ").host_cache_size == value
        log = {"max_queued_bytes": text, "segment_bytes": "64KiB"}
        assert KVCacheConfig.load(toml, env={}, log=log).log.max_queued_bytes == value
        toml.write_text(f'primary_bytes = "{text}"\n{toml.read_text()}')
        assert KVCacheConfig.load(toml, env={}).primary_bytes == value

    @pytest.mark.parametrize(
        "text", ["MiB", "1XB", "1mib", "-1MiB", "1 2MiB", "0KiB", "0.5B", "4194305TiB", "9" * 5000 + "B"]
    )
    def test_what_is_no_size(self, toml: Path, text: str) -> None:
        """A unit that there is not, and a size out of range, are refused with what is accepted."""
        with pytest.raises(
            ConfigError, match=r"primary_bytes: given .*; accepted: bytes, from 1 to 2\*\*62, also as"
        ):
            KVCacheConfig.load(toml, env={}, primary_bytes=text)

    def test_none_in_the_environment(self, toml: Path) -> None:
        """The word "none" takes a setting back where none is allowed, and is a name where it is one."""
        env = {"KVCACHE_PRIMARY_BLOCKS": "none", "KVCACHE_MAX_TOKENS": "64", "KVCACHE_BLOCK_HASH": "none"}
        loaded = KVCacheConfig.load(toml, env=env)
        assert (loaded.primary_blocks, loaded.max_tokens, loaded.block_hash) == (None, 64, "none")

    def test_empty_variable_is_unset(self, toml: Path) -> None:
        """An empty variable changes nothing, as scripts pass empty ones for settings they do not use."""
        assert KVCacheConfig.load(toml, env={"KVCACHE_MODEL": ""}).model == "file"

    def test_foreign_variables_are_ignored(self, toml: Path) -> None:
        """Variables of other programs have no meaning here."""
        assert KVCacheConfig.load(toml, env={"HEAD_DIM": "16", "XKVCACHE_HEAD_DIM": "16"}).head_dim == 8

    @pytest.mark.parametrize(
        ("variable", "says"),
        [
            (
                "KVCACHE_TOKEN_PER_BLOCK",
                "KVCACHE_TOKEN_PER_BLOCK (did you mean KVCACHE_TOKENS_PER_BLOCK?) is",
            ),
            ("KVCACHE_LOG_FSYNC", "KVCACHE_LOG_FSYNC (did you mean KVCACHE_LOG__FSYNC?) is"),
            (
                "KVCACHE_GPU_MEMORY_UTILIZATION",
                "KVCACHE_GPU_MEMORY_UTILIZATION (did you mean KVCACHE_FREE_GPU_MEMORY_FRACTION?) is",
            ),
            ("KVCACHE_URL", "KVCACHE_URL is"),
            ("KVCACHE_head_dim", "KVCACHE_head_dim is"),
            ("KVCACHE_\x1b[2J", "'KVCACHE_\\x1b[2J' is"),
        ],
    )
    def test_unknown_variable(self, toml: Path, variable: str, says: str) -> None:
        """A variable that is no setting's own sets nothing, with a warning that holds the name that may be meant."""
        with pytest.warns(UserWarning, match="is not a setting") as caught:
            loaded = KVCacheConfig.load(toml, env={variable: "se-cret", "KVCACHE_HEAD_DIM": "16"})
        assert loaded.head_dim == 16
        assert [str(warning.message) for warning in caught] == [f"{says} not a setting and is ignored"]
        assert caught[0].filename == __file__

    def test_words_of_other_software(self) -> None:
        """Each leads to a setting that there is, and none is one itself."""
        fields = KVCacheConfig.model_fields
        for theirs, ours in _HERE.items():
            assert theirs not in fields
            assert closest(theirs, fields) == ours

    def test_unknown_variables_give_one_warning(self, toml: Path) -> None:
        """Several are told at once."""
        with pytest.warns(UserWarning, match="are not settings") as caught:
            KVCacheConfig.load(toml, env={"KVCACHE_B": "1", "KVCACHE_A": "1"})
        reported = [str(warning.message) for warning in caught]
        assert reported == ["KVCACHE_A, KVCACHE_B are not settings and are ignored"]

    @pytest.mark.parametrize("service", ["KVCACHE", "KVCACHE_MODEL", "KVCACHE_LOG"])
    def test_variables_of_a_service(self, toml: Path, service: str) -> None:
        """What Kubernetes tells containers of a Service of that name has no meaning here, and no warning."""
        env = {
            f"{service}_SERVICE_HOST": "10.0.0.1",
            f"{service}_SERVICE_PORT": "5557",
            f"{service}_SERVICE_PORT_ZMQ_PUB": "5557",
            f"{service}_PORT": "tcp://10.0.0.1:5557",
            f"{service}_PORT_5557_TCP": "tcp://10.0.0.1:5557",
            f"{service}_PORT_5557_TCP_PROTO": "tcp",
            f"{service}_PORT_5557_TCP_PORT": "5557",
            f"{service}_PORT_5557_TCP_ADDR": "10.0.0.1",
            f"{service}_PORT_53_UDP_ADDR": "10.0.0.1",
        }
        assert KVCacheConfig.load(toml, env=env) == KVCacheConfig.load(toml, env={})

    def test_where_vllm_is_recorded_is_no_mistake(self) -> None:
        """`KVCACHE_LOG` is a directory, and no setting."""
        sizes: dict[str, Any] = {"max_sequence_length": 64, "primary_blocks": 4}
        recorded = KVCacheConfig.load(env={"KVCACHE_LOG": "/somewhere"}, **sizes)
        assert recorded == KVCacheConfig.load(env={}, **sizes)

    @pytest.mark.parametrize(
        "names", [["TCP_PORT"], ["X_SERVICE_HOST"], ["X_SERVICE_HOST", "X_SERVICE_PORT", "Y_PORT"]]
    )
    def test_what_ends_like_a_variable_of_a_service(self, toml: Path, names: list[str]) -> None:
        """A name that merely ends so, without the others that Kubernetes gives every Service, is told."""
        with pytest.warns(UserWarning, match="and (is|are) ignored") as caught:
            KVCacheConfig.load(toml, env={f"KVCACHE_{name}": "1" for name in names})
        assert all(f"KVCACHE_{name}" in str(caught[0].message) for name in names)

    def test_error_names_the_sources(self, toml: Path) -> None:
        """An error says which file and which variables the settings came from."""
        with pytest.raises(ConfigError) as caught:
            KVCacheConfig.load(toml, env={"KVCACHE_HEAD_DIM": "x"})
        assert caught.value.source == f"{toml}, KVCACHE_HEAD_DIM"
        assert caught.value.problems == ("head_dim: given 'x'; accepted: an integer from 1 to 2147483647",)

    @pytest.mark.parametrize(
        ("name", "text", "problem"),
        [
            ("cache.toml", "a = ", "cannot be read: "),
            ("cache.yaml", "a: [", "cannot be read: "),
            ("cache.yaml", "1: 2", "1: names of fields must be text"),
            ("cache.yaml", "null: 3", "None: names of fields must be text"),
            ("cache.yaml", 'primary_blocks: !!int ""', "cannot be read: "),
            ("cache.yaml", "a: !!bool foo", "cannot be read: "),
            ("cache.yaml", "a: !!timestamp foo", "cannot be read: "),
            ("cache.yaml", "a: " + "[" * 2_000, "cannot be read: "),
            ("cache.toml", "a = " + "[" * 2_000, "cannot be read: "),
            (
                "cache.yaml",
                "a:\n  b: [",
                "cannot be read: expected the node content, but found '<stream end>' (line 2)",
            ),
            ("cache.yaml", "- 1", "given list; accepted: a mapping of fields to values"),
            ("cache.json", "{}", "the file's name must end in .toml, .yaml, .yml"),
        ],
    )
    def test_unusable_file(self, tmp_path: Path, name: str, text: str, problem: str) -> None:
        """A file that is no settings file is refused by name."""
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            KVCacheConfig.load(path, env={})
        assert caught.value.source == str(path)
        assert caught.value.problems[0].startswith(problem)
        assert "\n" not in caught.value.problems[0]

    def test_absent_file(self, tmp_path: Path) -> None:
        """A file that does not exist is an error of the configuration, not a crash."""
        with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory$"):
            KVCacheConfig.load(tmp_path / "cache.toml", env={})

    def test_yaml_without_its_parser(self, tmp_path: Path, run_python: RunPython) -> None:
        """Without PyYAML the error names the extra to install, and TOML as the way without it."""
        (tmp_path / "cache.yaml").write_text(self.YAML)
        done = run_python(
            "import sys; sys.modules['yaml'] = None\n"
            "from kvcache.config import KVCacheConfig\n"
            "KVCacheConfig.load('cache.yaml', env={})"
        )
        assert "pip install 'kvcache[cli]', or use TOML" in done.stderr
