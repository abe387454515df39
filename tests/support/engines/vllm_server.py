"""vLLM's server with a tiny model of random weights and two LoRA adapters, as tests start, ask, stop and kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.support.engines.in_vllm import SECONDS, environment, plugins
from tests.support.engines.vllm_model import RANK, write_adapter, write_model
from tests.support.feeds.scraping import scraped
from tests.support.needs import program
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.waiting import wait_until

NAME, ADAPTERS, BLOCK = "base", ("x", "y"), 32
LONGEST = 30_000
"""Tokens of a sequence: so many take a minute and more."""
_OPTIONS: dict[str, Any] = {
    "served-model-name": NAME,
    "load-format": "dummy",
    "dtype": "float32",
    "max-model-len": LONGEST,
    "block-size": BLOCK,
    "num-gpu-blocks-override": 1024,
    "max-num-seqs": 4,
    "max-loras": len(ADAPTERS),
    "max-lora-rank": RANK,
    "host": "127.0.0.1",
}
_FLAGS = ("skip-tokenizer-init", "enforce-eager", "enable-lora")


class VLLMServer:
    """A server that is recorded where `log` is given, with this project's plugin installed in any case."""

    def __init__(self, directory: Path, log: Path | None = None, *options: str) -> None:
        self.port, self._output = free_port(), directory / "output"
        self._environment = environment(
            plugins(directory / "plugins"),
            HF_HUB_OFFLINE="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_NO_USAGE_STATS="1",
            **({} if log is None else {"KVCACHE_LOG": str(log)}),
        )
        adapters = [f"{name}={write_adapter(directory / name, seed)}" for seed, name in enumerate(ADAPTERS)]
        settings = [f"--{name}={value}" for name, value in (_OPTIONS | {"port": self.port}).items()]
        # What `vllm serve` runs. The command asks for the version of a package "vllm", which "vllm-cpu" is not.
        self._command = [program("vllm-cpu"), "-m", "vllm.entrypoints.openai.api_server"]
        self._command += ["--model", str(write_model(directory / "model")), *settings]
        self._command += [*(f"--{flag}" for flag in _FLAGS), "--lora-modules", *adapters, *options]

    def __enter__(self) -> Self:
        # A group of its own, so that all of its processes can be killed at once.
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, "the server does not come up", seconds=SECONDS)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.output[-4000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
        except OSError:
            return False
        return True

    def terminate(self) -> int:
        """End it as a service manager does; its exit status."""
        self._process.terminate()
        return self._process.wait(SECONDS)

    def kill(self) -> None:
        """All its processes, as when the machine has no memory left."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def counted(self, metric: str) -> int:
        """One of its metrics, without the "vllm:" before it."""
        return int(sum(value for (name, _), value in scraped(self.port).items() if name == f"vllm:{metric}"))

    def complete(self, *prompts: Sequence[int], tokens: int = 16, **more: Any) -> list[list[int]]:
        """What is sampled for prompts that come at once; always what is most likely."""
        with self._asked(prompts, tokens, more) as answer:
            return [choice["token_ids"] for choice in json.loads(answer.read())["choices"]]

    @contextmanager
    def streamed(self, prompt: Sequence[int]) -> Iterator[None]:
        """A client that has got the first token of many, and goes away in the end without having waited for more."""
        with self._asked([prompt], LONGEST - len(prompt), {"stream": True}) as answer:
            assert answer.readline().startswith(b"data:")
            yield

    def _asked(self, prompts: Sequence[Sequence[int]], tokens: int, more: dict[str, Any]) -> Any:
        asked = {
            "model": NAME,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=SECONDS)
