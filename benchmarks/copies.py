"""How fast blocks are copied between a device and host memory, beside one copy of the same bytes in one piece.

On a GPU its memory and page-locked memory of the host, on a machine without one the host's memory alone. Blocks are
scattered at random on both sides. Each number is the median of some repetitions in one process. What others do stands
beside it: a copy per block. `--endure` first copies at random for some seconds and compares every byte.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cuda_ops.copier import Copier, Copy, FinishedTicket, Ticket
from cuda_ops.dma import DmaCopier
from cuda_ops.hazards import schedule
from cuda_ops.host_memory import host_zeros
from cuda_ops.streams import TorchGpu
from cuda_ops.torch_copier import TorchCopier
from kvcache.device.copying import chosen, locker_for

KIB = 1024
BLOCKS = tuple(size * KIB for size in (16, 64, 256, 1024, 4096))
OFFLOAD, ONBOARD, BOTH = "to the host", "to the device", "both ways"
REPETITIONS = 7


@dataclass
class Storage:
    """Both levels, as copiers take them."""

    levels: tuple[torch.Tensor, ...]
    token_dim: int = 2


class BlockLoop:
    """A copy per block, each way on a stream of its own, as vLLM's `swap_blocks` and TensorRT-LLM make them."""

    def __init__(self, groups: Sequence[Sequence[Storage]]) -> None:
        self._levels = groups[0][0].levels

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Copy; on a GPU the current stream has them all."""
        for copy in copies:
            source, target = self._levels[copy.source_level], self._levels[copy.target_level]
            for first, second in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                target[second].copy_(source[first], non_blocking=True)
        return _Synchronized() if self._levels[0].is_cuda else FinishedTicket()


class _Synchronized(FinishedTicket):
    def wait(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize()


class Measured(NamedTuple):
    """One row of the table."""

    block: int
    way: str
    how: str
    seconds: float
    submit_seconds: float
    num_bytes: int
    ceiling: float
    """Seconds of the same bytes in one piece."""

    def cells(self) -> list[str]:
        """As text."""
        speed, share = self.num_bytes / self.seconds / 1e9, self.ceiling / self.seconds
        size = f"{self.block // KIB:,} KiB"
        return [size, self.way, self.how, f"{speed:.2f}", f"{share:.0%}", f"{self.submit_seconds * 1e6:,.0f}"]


HEAD = ["block", "way", "by", "GB/s", "of one copy", "CPU to submit, µs"]


class Bench:
    """Memory of both levels, of which every block size is a view."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.host = host_zeros(num_bytes, max(BLOCKS), locker_for(device))
        self.host.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))
        self.far = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        self.found = chosen(device)

    def storage(self, block: int) -> Storage:
        """All memory as blocks of this size."""
        return Storage((self.far.view(-1, 1, 1, block), self.host.view(-1, 1, 1, block)))

    def copiers(self, block: int) -> Iterator[tuple[str, Copier]]:
        """What is compared."""
        groups = [[self.storage(block)]]
        yield "a copy per block", BlockLoop(groups)
        yield "torch's copies of runs", TorchCopier(groups)
        if self.found.memcpy is not None:
            yield "lists (cuMemcpyBatchAsync)", DmaCopier(groups, self.found.memcpy, TorchGpu(self.device))

    def synchronize(self) -> None:
        """Wait for the device, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median(self, run: Callable[[], float]) -> tuple[float, float]:
        """Seconds until all has ended, and until `run`, which says that, had submitted it."""
        run()
        found = []
        for _ in range(REPETITIONS):
            self.synchronize()
            begun = time.perf_counter()
            submitted = run()
            self.synchronize()
            found.append((time.perf_counter() - begun, submitted - begun))
        return statistics.median(each for each, _ in found), statistics.median(each for _, each in found)

    def ceiling(self, way: str) -> float:
        """Seconds of one copy each way."""
        half = self.num_bytes // 2
        pieces = {
            OFFLOAD: [(self.host, self.far)],
            ONBOARD: [(self.far, self.host)],
            BOTH: [(self.host[:half], self.far[:half]), (self.far[half:], self.host[half:])],
        }[way]
        streams = [TorchGpu(self.device).new_stream() for _ in pieces] if self.device.type == "cuda" else []

        def run() -> float:
            for number, (target, source) in enumerate(pieces):
                if streams:
                    with TorchGpu(self.device).on(streams[number]):
                        target.copy_(source, non_blocking=True)
                else:
                    target.copy_(source)
            return time.perf_counter()

        return self.median(run)[0]

    def measure(self, block: int, way: str, how: str, copier: Copier, ceiling: float) -> Measured:
        """All bytes, block by block, in any order."""
        count, dice = self.num_bytes // block, np.random.default_rng(block)
        one, other = (dice.permutation(count).astype(np.int32) for _ in range(2))
        half = count // 2
        copies = {
            OFFLOAD: [Copy(0, 1, one, other)],
            ONBOARD: [Copy(1, 0, one, other)],
            BOTH: [
                Copy(0, 1, one[:half], other[:half]),
                Copy(1, 0, other[half:], one[half:]),
            ],
        }[way]

        def run() -> float:
            ticket = copier.submit(copies)
            submitted = time.perf_counter()
            ticket.wait()
            return submitted

        seconds, submit = self.median(run)
        return Measured(block, way, how, seconds, submit, self.num_bytes, ceiling)

    def concurrent_with_model(self) -> list[str]:
        """What copies both ways cost a matrix product, and a copy of 4 bytes; on a GPU only."""
        if self.device.type != "cuda" or self.found.memcpy is None:
            return []
        block = 1024 * KIB
        copier = DmaCopier([[self.storage(block)]], self.found.memcpy, TorchGpu(self.device))
        half = np.arange(self.num_bytes // block // 2, dtype=np.int32)
        batch = [Copy(0, 1, half, half), Copy(1, 0, half + len(half), half + len(half))]
        matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.device)
        small = torch.zeros(1, dtype=torch.int32, device=self.device)

        def product(copying: bool) -> float:
            if copying:
                copier.submit(batch)
            for _ in range(10):
                matrix @ matrix
            torch.cuda.current_stream(self.device).synchronize()
            return time.perf_counter()

        alone, busy = (self.median_of_stream(product, copying) for copying in (False, True))
        waits = [
            self.median_of_stream(lambda copying: self._small(copier, batch, small, copying), each)
            for each in (False, True)
        ]
        return [
            f"A product of 8192 × 8192 in bfloat16 takes {busy / alone - 1:+.1%} beside copies both ways.",
            f"A copy of 4 bytes to the host takes {waits[0] * 1e6:,.0f} µs, {waits[1] * 1e6:,.0f} µs behind a batch.",
        ]

    def _small(self, copier: Copier, batch: list[Copy], small: torch.Tensor, copying: bool) -> float:
        if copying:
            copier.submit(batch)
        begun = time.perf_counter()
        small.cpu()
        return time.perf_counter() - begun + self._begun

    _begun = 0.0

    def median_of_stream(self, run: Callable[[bool], float], copying: bool) -> float:
        """Seconds until `run` says, in which not all that was submitted has ended."""
        found = []
        for _ in range(REPETITIONS + 1):
            self.synchronize()
            self._begun = time.perf_counter()
            found.append(run(copying) - self._begun)
        self.synchronize()
        return statistics.median(found[1:])

    def endure(self, seconds: float, block: int = 64 * KIB) -> int:
        """Copy at random and compare every byte; how many blocks were copied. Raises AssertionError for a wrong one."""
        storage, dice = self.storage(block), random.Random(0)
        *_, (_, copier) = self.copiers(block)
        count, copied = min(512, self.num_bytes // block), 0
        some = min(16, count // 4)
        levels = [level[:count].view(torch.int64) for level in storage.levels]
        expected = np.arange(2 * count).reshape(2, count)
        for level, values in zip(levels, expected, strict=True):
            level.copy_(torch.from_numpy(values).view(-1, 1, 1, 1))
        side = 2048 if self.device.type == "cuda" else 64
        matrix = torch.randn(side, side, device=self.device)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            copies = []
            for _ in range(dice.randrange(1, 20)):
                source, target = dice.choice([(0, 1), (1, 0), (0, 0)])
                slots = np.array(dice.sample(range(count), 2 * some), np.int32)
                copies.append(Copy(source, target, slots[:some], slots[some:]))
                expected[target][slots[some:]] = expected[source][slots[:some]]
            for batch in schedule(copies):
                copier.submit([copies[number] for number in batch]).wait_on()
            matrix @ matrix
            slot = dice.randrange(count)  # the model writes, and is not waited for
            expected[0][slot] = copied
            levels[0][slot] = copied
            copied += some * len(copies)
            if dice.random() < 0.05:
                self.synchronize()
                for level, values in zip(levels, expected, strict=True):
                    assert bool((level.cpu() == torch.from_numpy(values).view(-1, 1, 1, 1)).all()), (
                        "wrong bytes"
                    )
        return copied


def environment(device: torch.device) -> list[str]:
    """What the numbers were measured on."""
    lines = [f"torch {torch.__version__}, {platform.system()} {platform.release()}, {platform.machine()}"]
    if device.type == "cuda":
        fields = "name,driver_version,pcie.link.gen.current,pcie.link.width.current"
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        lines.append(f"{done.stdout.strip()} (name, driver, PCIe generation, width)")
    return [*lines, f"copies: {chosen(device).why}"]


def markdown(rows: list[list[str]]) -> list[str]:
    """A table."""
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=256, help="MiB of each level (default: %(default)s)")
    parser.add_argument(
        "--endure", type=float, default=0, metavar="SECONDS", help="copy at random first, and compare"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table to a file")
    args: Any = parser.parse_args(argv)
    device = torch.empty(0, device=args.device).device
    if device.type == "cpu":
        torch.set_num_threads(1)  # as memcpy, and whoever else has the other cores
    bench = Bench(device, args.mib * KIB * KIB)
    lines = [f"# Copies of blocks on {device}", "", *(f"- {line}" for line in environment(device)), ""]
    if args.endure:
        lines += [
            f"{bench.endure(args.endure):,} blocks copied at random in {args.endure:g} s: every byte right.",
            "",
        ]
    rows = [HEAD]
    for way in (OFFLOAD, ONBOARD, BOTH):
        ceiling = bench.ceiling(way)
        lines.append(f"One copy {way}: {bench.num_bytes / ceiling / 1e9:.2f} GB/s.")
        for block in (each for each in BLOCKS if each <= bench.num_bytes // 2):
            rows += [
                bench.measure(block, way, how, each, ceiling).cells() for how, each in bench.copiers(block)
            ]
    text = "\n".join([*lines, *bench.concurrent_with_model(), "", *markdown(rows), ""])
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
