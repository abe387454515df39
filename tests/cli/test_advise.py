"""``kvcache advise``: its page, that the commands on it are right, and its JSON."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.answers import assert_documented
from tests.support.commands import TRACE, Kvcache
from tests.support.logs.served import (
    SIZE,
    Asked,
    Texts,
    round_robin,
    serve,
    two_tenants,
    with_a_system_prompt,
    with_an_id,
    write_trace,
)
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "how-to" / "advise.md").read_text(encoding="utf-8")


def said(kvcache: Kvcache, *args: Any) -> dict[str, Any]:
    done = kvcache("advise", *args, "--json", "-q")
    assert (done.code, done.err) == (0, "")
    [source] = json.loads(done.out)["sources"]
    return dict(source)


def flat(page: str) -> str:
    """The page as one line."""
    return re.sub(r"\s+", " ", page)


def proofs(page: str) -> list[list[str]]:
    """The commands; all other lines below the log's name fit a window of 120 letters."""
    others = [line for line in page.splitlines()[1:] if not line.strip().startswith("kvcache ")]
    assert max(map(len, others)) <= 120
    return [shlex.split(line)[1:] for line in page.splitlines() if line.strip().startswith("kvcache ")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in turn, in a cache that is too small for them. Not to be changed."""
    return serve(tmp_path_factory.mktemp("small") / "its log", round_robin(200, 20), primary_blocks=100)


class TestPage:
    """What people read."""

    def test_each_line_has_a_command_that_works(self, kvcache: Kvcache, small: Path, tmp_path: Path) -> None:
        """Every one that is named ends well, whatever the directory is called."""
        page = kvcache("advise", small).out
        commands = proofs(page)
        assert {each[0] for each in commands} == {"curve", "whatif", "events", "replay", "audit"}
        topics = re.findall(r"(?m)^  \S", page.partition("unknown")[0])
        assert (len(commands), len(topics)) == (7, 8)  # that there is no volatile part has none
        for command in commands:
            assert kvcache(*command).code == 0, command

    def test_commands_prove_what_is_said(self, kvcache: Kvcache, small: Path) -> None:
        """The numbers of a line are in what its command prints."""
        of = {each["topic"]: each for each in said(kvcache, small)["advice"]}

        def proof(topic: str) -> Any:
            done = kvcache(*shlex.split(of[topic]["proof"])[1:], "--json", "-q")
            return json.loads(done.out)

        size = of["size"]["about"]
        rates = {each["blocks"]: each["hit_rate"] for each in proof("size")["sizes"]}
        assert (rates[size["blocks"]], rates[size["knee_blocks"]]) == (
            size["hit_rate"],
            size["knee_hit_rate"],
        )
        [whatif] = proof("primary")["trials"]
        recorded = proof("primary")["recorded"]
        assert recorded["computed_tokens"] - whatif["computed_tokens"] == pytest.approx(
            of["primary"]["saved_tokens"], rel=0.1
        )
        assert proof("running")["groups"][0]["primary"]["held"] == of["running"]["about"]["most_held_blocks"]

    def test_what_differs_is_explained(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The request that is named computed what follows its id."""
        log = serve(tmp_path / "log", with_an_id(110), primary_blocks=6000)
        page = kvcache("advise", log).out
        assert (
            "110 prompts share the first 38 tokens, differ in the next 12 to 14 (110 versions), and share"
            in flat(page)
        )
        [explain] = [each for each in proofs(page) if each[0] == "explain"]
        assert re.search(r"never seen before", kvcache(*explain).out)
        assert (
            "without the differing part in the middle of its prompts the curve would be another one"
            in flat(page)
        )

    def test_a_system_prompt_that_goes(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Its block is evicted again and again, which the command shows."""
        log = serve(tmp_path / "log", with_a_system_prompt(120, every=6), primary_blocks=80)
        page = kvcache("advise", log).out
        worth = page.partition("worth doing")[2].partition("not worth it")[0]
        assert "20 requests begin with the same 128 tokens, " in worth
        assert "(the first is request 0)" in worth
        assert "pinning them takes 10.0 % of primary" in flat(worth)
        [events] = [each for each in proofs(page) if each[0] == "events"]
        assert kvcache(*events).out.count("BlocksRemoved") >= 19

    def test_tenants(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """They are named by their labels, which cannot drive a terminal."""
        asked = [each._replace(label=f"\x1b{each.label}") for each in two_tenants(120, flood=60, label=True)]
        log = serve(tmp_path / "log", asked, primary_blocks=100)
        out = kvcache("advise", log).out
        assert "\\x1bquiet loses " in out
        assert "most of them for \\x1bloud" in flat(out)
        [advice] = [each for each in said(kvcache, log)["advice"] if each["topic"] == "tenant"]
        proof = kvcache(*shlex.split(advice["proof"])[1:])
        lost = advice["about"]["lost_tokens"]
        assert advice["about"]["by"] == "tenant"
        assert re.search(rf"quiet +.x1bloud +[\d,]+ +{lost:,}\n", proof.out)
        assert "\x1b" not in out

    def test_tenants_that_lose_alike(self, kvcache: Kvcache, small: Path, tmp_path: Path) -> None:
        """None is named, and the command shows each of them."""
        requests = [
            asked._replace(label="ab"[number % 2]) for number, asked in enumerate(round_robin(200, 20))
        ]
        page = kvcache("advise", serve(tmp_path / "log", requests, primary_blocks=100)).out
        assert re.search(
            r"tenants +all tenants lose [\d.]+ % of their prompt tokens to evictions\n.* --by tenant\n", page
        )
        assert re.search(r"tenants +there is only one tenant\n.* --by lora\n", kvcache("advise", small).out)

    def test_running_requests(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """They come first, and no pin is advised."""
        log = serve(tmp_path / "log", round_robin(200, 20), primary_blocks=95, running=8)
        page = kvcache("advise", log).out
        assert re.search(r"worth doing\n  concurrency +7\.9 running requests hold 86 of 95 blocks", page)
        assert "With 4 concurrent requests half of the blocks are free for reuse" in flat(page)

    def test_too_few(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """One line says how long the log should be."""
        log = serve(tmp_path / "log", round_robin(40, 5), primary_blocks=40)
        done = kvcache("advise", log)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert "has only 40 requests in 39 s; advice needs at least 100: 98 s at this rate" in done.err

    def test_several(self, kvcache: Kvcache, small: Path, tmp_path: Path) -> None:
        """Each has its page."""
        trace = write_trace(tmp_path / "trace", round_robin(120, 6))
        done = kvcache("advise", small, trace, "--json")
        assert [each["log"] for each in json.loads(done.out)["sources"]] == [str(small), str(trace)]
        assert kvcache("advise", small, trace).out.count("worth doing") == 2

    def test_a_timeout(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """One asks for minutes."""
        trace = write_trace(tmp_path / "trace", round_robin(120, 5, seconds=20))
        assert (
            "keep idle blocks for 2 min: if they are dropped after 60 s an unbounded cache loses"
            in kvcache("advise", trace, "--ttl", 1, "--tokens-per-block", SIZE).out
        )
        assert (
            "if idle blocks are dropped after 2 min an unbounded cache loses nothing"
            in kvcache("advise", trace, "--ttl", "2min", "--tokens-per-block", SIZE).out
        )
        assert said(kvcache, trace, "--ttl", "90s", "--tokens-per-block", SIZE) == said(
            kvcache, trace, "--ttl", "1.5min", "--tokens-per-block", SIZE
        )
        for wrong in ("5x", "0", "0s"):
            assert "--ttl" in kvcache("advise", trace, "--ttl", wrong).err


class TestCosts:
    """Seconds, money and bytes beside tokens."""

    def test_gpu_hours(self, kvcache: Kvcache, small: Path) -> None:
        """A formula without reads takes the same for each token; money is for each hour of the log."""
        options = ("--prefill", "1ms n", "--price", 3)
        of = said(kvcache, small, *options)
        [size] = [each for each in of["advice"] if each["topic"] == "size"]
        hours = size["saved_tokens"] * 0.001 / 3600
        assert size["saved_gpu_hours"] == pytest.approx(hours)
        assert size["saved_per_hour"] == pytest.approx(hours * 3 / (of["seconds"] / 3600))
        page = flat(kvcache("advise", small, *options).out)
        assert re.search(
            r"tokens \(\d+\.\d % of all, 0\.00\d+ GPU-hours\), or [\d,]+ tokens/h and [\d.]+ USD/h", page
        )
        little = kvcache("advise", small, "--prefill", "1us n", "--price", 3).out
        assert "< 0.001 GPU-hours" in flat(little)
        bare = said(kvcache, small)
        assert {each["saved_gpu_hours"] for each in bare["advice"]} == {None}

    def test_reads(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Where a token takes as long as it reads others, those that are saved are as far into their prompts as all."""
        texts = Texts()
        document = texts.fresh(320)
        trace = tmp_path / "trace"
        lines = (
            json.dumps({"timestamp": at, "prompt_token_ids": [*texts.fresh(20), *document]})
            for at in range(100)
        )
        trace.write_text("\n".join(lines))
        of = said(kvcache, trace, "--tokens-per-block", SIZE, "--prefill", "1ms n m")
        [volatile] = [each for each in of["advice"] if each["topic"] == "volatile"]
        assert volatile["saved_tokens"] == 99 * 320
        assert volatile["saved_gpu_hours"] == pytest.approx(99 * 320 * 170 * 0.001 / 3600)

    def test_bytes(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """Of the log's model, or of one that is given."""
        log = serve(tmp_path / "log", round_robin(120, 20), primary_blocks=100, num_layers=8)
        of = said(kvcache, log)
        assert of["bytes_per_block"] == 8 * 2 * 2 * 8 * 2 * SIZE
        assert (
            f"the current 100 blocks (1,600 tokens, {100 * of['bytes_per_block'] / 1024:,.1f} KiB)"
            in flat(kvcache("advise", log).out)
        )

    def test_commands_have_the_same_options(self, kvcache: Kvcache, small: Path, tmp_path: Path) -> None:
        """Those of costs go to each command that takes them, and it takes them; others go with a trace, too."""
        costs = ("--prefill", "1ms n", "--gpus", 2, "--price", 2.5, "--currency", "EUR")
        shape = {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 16,
            "torch_dtype": "bfloat16",
        }
        model = tmp_path / "config.json"
        model.write_text(json.dumps(shape | {"num_key_value_heads": 2, "model_type": "llama"}))
        options = [*map(str, costs), "--model-config", str(model), "--kv-dtype", "fp8"]
        trace = write_trace(tmp_path / "trace", round_robin(120, 20))
        of_trace = ("--tokens-per-block", SIZE, "--primary-blocks", 100)
        for commands in (
            proofs(kvcache("advise", small, *options).out),
            proofs(kvcache("advise", trace, *options, *of_trace).out),
        ):
            for command in commands:
                assert set(options) <= set(command) or command[0] in ("events", "replay")
            [whatif] = [
                each for each in commands if each[:3:2] == ["whatif", "--set"] and "secondary" in each[3]
            ]
            assert "EUR saved/h" in kvcache(*whatif).out


class TestTraces:
    """Without a cache, and played through one."""

    def test_with_a_cache(self, kvcache: Kvcache, tmp_path: Path) -> None:
        """The same is said as of its log, and the commands play it the same way."""
        trace = write_trace(tmp_path / "trace", round_robin(120, 20))
        options = ("--tokens-per-block", SIZE, "--primary-blocks", 100, "--concurrency", 1)
        of = said(kvcache, trace, *options)
        assert of["num_blocks"] == {"primary": 100, "secondary": 0}
        page = kvcache("advise", trace, *options)
        assert "played at its own times through a cache of 100 + 0 blocks of 16 tokens" in page.err
        commands = {each[0]: each for each in proofs(page.out)}
        assert set(commands) == {"curve", "whatif", "audit", "report"}
        for name in ("whatif", "audit"):
            assert "--primary-blocks 100 --secondary-blocks 0 --tokens-per-block 16" in " ".join(
                commands[name]
            )
            assert kvcache(*commands[name], "-q").code == 0
        whole = [word for word in commands["audit"] if word not in ("--by", "lora")]
        audit = json.loads(kvcache(*whole, "--json", "-q").out)
        assert audit["evictions"]["recomputed_tokens"] == of["lost_tokens"] > 0
        assert audit["reused_tokens"] == of["reused_tokens"]

    def test_numbers_for_blocks(
        self, kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own blocks are played, also from a pipe; that only blocks can be compared is said."""
        lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
        more = [{**line, "timestamp": line["timestamp"] + 5000 * turn} for turn in range(3) for line in lines]
        text = "".join(json.dumps(line) + "\n" for line in more)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        page = kvcache("advise", "-", "--primary-blocks", 50, "-q").out
        assert "to blocks of 512 tokens: the trace has no token ids" in flat(page)
        assert "50 blocks" in page
        (tmp_path / "trace").write_text(text)
        done = kvcache("advise", tmp_path / "trace", "--primary-blocks", 50, "--tokens-per-block", 64)
        assert done.code == 2
        assert "the blocks of this trace have 512 tokens, which cannot be changed" in done.err

    @pytest.mark.parametrize("option", ["--primary-blocks", "--tokens-per-block", "--concurrency"])
    def test_options_of_traces(self, kvcache: Kvcache, small: Path, option: str) -> None:
        """Are refused beside a log."""
        assert f"{option} is only valid for traces" in kvcache("advise", small, option, 16).err


def test_every_key_is_documented(kvcache: Kvcache, tmp_path: Path) -> None:
    """The table has each key that there is, and no other ones."""
    requests = [
        asked for pair in zip(with_an_id(120), two_tenants(240, flood=60), strict=False) for asked in pair
    ]
    log = serve(tmp_path / "log", requests, primary_blocks=100)
    options = ("--prefill", "1ms n", "--price", 3, "--ttl", 1)
    kinds = [
        said(kvcache, log, *options),
        said(kvcache, write_trace(tmp_path / "trace", round_robin(640, 10)), *options),
    ]
    assert_documented("advise", {"sources": kinds})


def test_the_example_on_the_page(kvcache: Kvcache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload that the page describes gives what stands there."""
    monkeypatch.chdir(tmp_path)
    write_trace(Path("requests.jsonl"), example())
    reported = kvcache("advise", "requests.jsonl", *EXAMPLE, "-q").out
    assert (
        reported
        == PAGE.partition("$ kvcache advise requests.jsonl")[2].partition("\n")[2].partition("```")[0]
    )


EXAMPLE = ("--tokens-per-block", 16, "--primary-blocks", 400, "--concurrency", 4)


def example() -> Iterator[Asked]:
    """An assistant with a date in its instructions, and questions on documents of another application."""
    texts = Texts(9)
    instructions, documents = texts.fresh(1200), [texts.fresh(900) for _ in range(12)]
    for number in range(400):
        clock = texts.fresh(7)
        assistant = [*instructions[:30], *clock, *instructions[30:], *texts.fresh(60)]
        reader = [*documents[number % 12], *texts.fresh(40)]
        tenant = "assistant" if number % 4 else "reader"
        yield Asked(assistant if number % 4 else reader, tenant, 4.0)
