"""How fast blocks are copied between a device and host memory, beside one copy of the same bytes in one piece.

On a GPU its memory and page-locked memory of the host, on a machine without one the host's memory alone. Blocks are
scattered at random on both sides, one by one and in runs of eight. Each number is the median of some repetitions in one
process, beside a copy per block as other managers make them. `--endure` first copies at random for some seconds and
compares every byte.
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
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cuda_ops.copier import Copier, Copy, FinishedTicket, Ticket
from cuda_ops.dma import DmaCopier, Kernel
from cuda_ops.hazards import schedule
from cuda_ops.host_memory import CHUNK_BYTES, host_zeros
from cuda_ops.streams import Gpu, TorchGpu
from cuda_ops.torch_copier import TorchCopier
from kvcache.device.copying import chosen, locker_for

KIB = 1024
BLOCKS = tuple(size * KIB for size in (16, 64, 256, 1024, 4096))
OFFLOAD, ONBOARD, BOTH, INSIDE = "to the host", "to the device", "both ways", "within the device"
REPETITIONS = 7
RUN = 8
"""Adjacent blocks in the runs that are also measured, for the smallest blocks."""
TOKENS = 4
"""Tokens per block in the endurance run."""
PRODUCTS = 4
"""Matrix products beside copies of a GiB, which take longer."""
SUBMITTED = 256
"""Scattered blocks of the batch of which the CPU time to submit is given."""


@dataclass
class Storage:
    """Both levels, as copiers take them."""

    levels: tuple[torch.Tensor, ...]
    token_dim: int = 2


class BlockLoop:
    """A copy per block, each way on a stream of its own, as vLLM's `swap_blocks` and TensorRT-LLM make them."""

    def __init__(self, groups: Sequence[Sequence[Storage]], gpu: Gpu | None) -> None:
        self._levels, self._gpu = groups[0][0].levels, gpu
        self._streams = [gpu.new_stream() for _ in self._levels] if gpu is not None else []

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Copy; on a GPU after nothing but the copies to the same level."""
        for copy in copies:
            source, target = self._levels[copy.source_level], self._levels[copy.target_level]
            on = nullcontext() if self._gpu is None else self._gpu.on(self._streams[copy.target_level])
            with on:
                for first, second in zip(copy.source.tolist(), copy.target.tolist(), strict=True):
                    target[second].copy_(source[first], non_blocking=True)
        return Synchronized(self._levels[0].device)


class KernelCopies:
    """Copies by Triton's kernel alone, to see for which blocks it is faster than lists."""

    def __init__(self, storage: Storage, kernel: Kernel) -> None:
        self._levels, self._kernel = storage.levels, kernel

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Copy on the current stream."""
        for copy in copies:
            pairs = np.stack((copy.source, copy.target), axis=1)
            self._kernel(self._levels[copy.source_level], self._levels[copy.target_level], pairs, None)
        return Synchronized(self._levels[0].device)


class Synchronized(FinishedTicket):
    """Copies that end with all other work of a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def wait(self) -> None:
        """Wait for the whole device; on a machine without a GPU there is nothing to wait for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class DelayingGpu(TorchGpu):
    """A GPU of which any stream can be held up."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams: list[Any] = []

    def new_stream(self) -> Any:
        """Create a stream, and remember it."""
        self._streams.append(super().new_stream())
        return self._streams[-1]

    def delay(self, dice: random.Random) -> None:
        """Hold up a stream, the model's included, for up to a millisecond or so."""
        with self.on(dice.choice([*self._streams, self.current_stream()])):
            torch.cuda._sleep(dice.randrange(2_000_000))  # type: ignore[no-untyped-call]


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
    run: int = 1
    """Adjacent blocks."""

    def cells(self) -> list[str]:
        """As text."""
        speed, share = self.num_bytes / self.seconds / 1e9, self.ceiling / self.seconds
        size = f"{self.block // KIB:,} KiB"
        return [
            size if self.run == 1 else f"{size}, runs of {self.run}",
            self.way,
            self.how,
            f"{speed:.2f}",
            f"{share:.0%}",
            f"{self.submit_seconds * 1e6:,.0f}",
        ]


HEAD = ["block", "way", "by", "GB/s", "of one copy", "CPU to submit, µs"]


class Bench:
    """Memory of both levels, of which every block size is a view."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self.host = host_zeros(num_bytes, max(BLOCKS), locker_for(device))
        self.host.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))
        self.far = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        self.found = chosen(device)

    @property
    def gpu(self) -> TorchGpu | None:
        """The GPU, if there is one."""
        return TorchGpu(self.device) if self.device.type == "cuda" else None

    def storage(self, block: int, rows: int = 1, tokens: int = 1) -> Storage:
        """All memory as blocks of this size."""
        shape = (-1, rows, tokens, block // rows // tokens)
        return Storage((self.far.view(shape), self.host.view(shape)))

    def copiers(self, block: int, way: str = BOTH) -> Iterator[tuple[str, Copier]]:
        """What is compared."""
        groups = [[self.storage(block)]]
        yield "a copy per block", BlockLoop(groups, self.gpu)
        yield "torch's copies of runs", TorchCopier(groups)
        if self.found.memcpy is not None:
            yield "lists (cuMemcpyBatchAsync)", DmaCopier(groups, self.found.memcpy, TorchGpu(self.device))
        if self.found.kernel is not None and way in (ONBOARD, INSIDE):
            yield "Triton kernel", KernelCopies(groups[0][0], self.found.kernel)

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
            INSIDE: [(self.far[half : 2 * half], self.far[:half])],
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

    def batch(self, block: int, way: str, run: int = 1) -> list[Copy]:
        """All bytes, in runs of adjacent blocks at random places; within the device half of them onto the others."""
        count, dice = self.num_bytes // block // run, np.random.default_rng(block)
        one, other = (
            (dice.permutation(count)[:, None] * run + np.arange(run)).ravel().astype(np.int32)
            for _ in range(2)
        )
        half = count * run // 2
        return {
            OFFLOAD: [Copy(0, 1, one, other)],
            ONBOARD: [Copy(1, 0, one, other)],
            BOTH: [Copy(0, 1, one[:half], other[:half]), Copy(1, 0, other[half:], one[half:])],
            INSIDE: [Copy(0, 0, one[:half], one[half : 2 * half])],
        }[way]

    def measure(
        self, block: int, way: str, how: str, copier: Copier, ceiling: float, run: int = 1
    ) -> Measured:
        """One row."""
        copies = self.batch(block, way, run)

        def once() -> float:
            ticket = copier.submit(copies)
            submitted = time.perf_counter()
            ticket.wait()
            return submitted

        seconds, submit = self.median(once)
        num_bytes = sum(copy.source.size for copy in copies) * block
        return Measured(block, way, how, seconds, submit, num_bytes, ceiling, run)

    def rows(self, way: str, ceiling: float) -> Iterator[Measured]:
        """Yield all block sizes by all copiers, and runs of the smallest blocks."""
        shapes = [(block, 1) for block in BLOCKS if block <= self.num_bytes // 2]
        for block, run in (*shapes, (BLOCKS[0], RUN)):
            for how, copier in self.copiers(block, way):
                yield self.measure(block, way, how, copier, ceiling, run)

    def submission(self) -> str:
        """State the CPU time to submit a batch of scattered blocks by the last of the copiers for both ways."""
        *_, (how, copier) = self.copiers(BLOCKS[1])
        (copy,) = self.batch(BLOCKS[1], ONBOARD)
        some = Copy(1, 0, copy.source[:SUBMITTED], copy.target[:SUBMITTED])

        def once() -> float:
            ticket = copier.submit([some])
            submitted = time.perf_counter()
            ticket.wait()
            return submitted

        micros = self.median(once)[1] * 1e6
        what = f"{some.source.size} scattered blocks of 64 KiB to the device, by {how}"
        return f"Submitting {what}: {micros:,.0f} µs of CPU."

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

        def product() -> None:
            for _ in range(PRODUCTS):
                matrix @ matrix
            torch.cuda.current_stream(self.device).synchronize()

        def beside(work: Callable[[], object], copying: bool) -> float:
            found = []
            for _ in range(REPETITIONS + 1):
                self.synchronize()
                if copying:
                    copier.submit(batch)
                begun = time.perf_counter()
                work()  # which does not wait for the copies
                found.append(time.perf_counter() - begun)
            self.synchronize()
            return statistics.median(found[1:])

        alone, busy = (beside(product, copying) for copying in (False, True))
        waits = [beside(small.cpu, copying) * 1e6 for copying in (False, True)]
        return [
            f"A product of 8192 × 8192 in bfloat16 takes {busy / alone - 1:+.1%} beside copies both ways.",
            f"A copy of 4 bytes to the host takes {waits[0]:,.0f} µs, {waits[1]:,.0f} µs behind a batch.",
        ]

    def endure(self, seconds: float, block: int = 64 * KIB) -> int:
        """Copy at random for some time, and compare every byte; return the number of blocks copied.

        Raises AssertionError for a wrong one.
        """
        program, end = Endurance(self, block), time.monotonic() + seconds
        while time.monotonic() < end:
            program.step()
        self.synchronize()
        program.compare()
        return program.copied


class Endurance:
    """Copies of blocks and their parts, with streams held up at random, beside what they should leave."""

    def __init__(self, bench: Bench, block: int) -> None:
        storage, found = bench.storage(block, rows=2, tokens=TOKENS), bench.found
        self._bench, self._dice, self.copied = bench, random.Random(0), 0
        self._gpu = DelayingGpu(bench.device) if bench.device.type == "cuda" else None
        self._copier: Copier = TorchCopier([[storage]])
        if self._gpu is not None and found.memcpy is not None:
            self._copier = DmaCopier([[storage]], found.memcpy, self._gpu, kernel=found.kernel)
        self._count = min(512, bench.num_bytes // block)
        self._levels = [level[: self._count].view(torch.int64) for level in storage.levels]
        self._expected = np.arange(2 * self._count * TOKENS).reshape(2, self._count, TOKENS)
        for level, values in zip(self._levels, self._expected, strict=True):
            level.copy_(torch.from_numpy(values)[:, None, :, None])
        side = 64 if self._gpu is None else 2048
        self._matrix = torch.randn(side, side, device=bench.device)

    def _copies(self) -> list[Copy]:
        """Some copies; what they should leave is noted."""
        copies, some = [], min(16, self._count // 4)
        for _ in range(self._dice.randrange(1, 20)):
            source, target = self._dice.choice([(0, 1), (1, 0), (0, 0)])
            slots = np.array(self._dice.sample(range(self._count), 2 * some), np.int32)
            from_, to, tokens = slots[:some], slots[some:], self._dice.choice([None, None, 1, TOKENS - 1])
            copies.append(Copy(source, target, from_, to, tokens))
            self._expected[target][to, :tokens] = self._expected[source][from_, :tokens]
            self.copied += some
        return copies

    def step(self) -> None:
        """Copy, compute and write; sometimes compare what has arrived."""
        copies, dice = self._copies(), self._dice
        if self._gpu is not None and dice.random() < 0.2:
            self._gpu.delay(dice)
        batches = [[copies[number] for number in numbers] for numbers in schedule(copies)]
        tickets = [self._submitted(batch) for batch in batches]
        if dice.random() < 0.2:  # the host reads as soon as it may, with other copies under way
            tickets[-1].wait()
            for copy in batches[-1]:
                if copy.target_level == 1:
                    self._same(1, copy.target.tolist())
        self._matrix @ self._matrix
        slot = dice.randrange(self._count)  # the model writes, and is not waited for
        self._expected[0][slot] = self.copied
        self._levels[0][slot] = self.copied
        if dice.random() < 0.05:
            self._bench.synchronize()
            self.compare()

    def _submitted(self, batch: list[Copy]) -> Ticket:
        ticket = self._copier.submit(batch)
        ticket.wait_on()
        return ticket

    def compare(self) -> None:
        """Compare all bytes, when nothing is under way."""
        for level in range(2):
            self._same(level, list(range(self._count)))

    def _same(self, level: int, slots: list[int]) -> None:
        right = torch.from_numpy(self._expected[level][slots])[:, None, :, None]
        assert bool((self._levels[level][slots].cpu() == right).all()), "wrong bytes"


def environment(device: torch.device) -> list[str]:
    """What the numbers were measured on."""
    lines = [f"torch {torch.__version__}, {platform.system()} {platform.release()}, {platform.machine()}"]
    if device.type == "cuda":
        fields = "name,driver_version,pcie.link.gen.current,pcie.link.width.current"
        with suppress(OSError):  # not in every container
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
    if not 1 <= args.mib * KIB * KIB <= CHUNK_BYTES:
        # One copy must not cross an edge of page-locked chunks, and the ceilings are one copy.
        parser.error(f"argument --mib: accepted: 1 to {CHUNK_BYTES >> 20}")
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
    for way in (OFFLOAD, ONBOARD, BOTH, INSIDE):
        num_bytes = bench.num_bytes // (2 if way == INSIDE else 1)
        ceiling = bench.ceiling(way)
        rows += [measured.cells() for measured in bench.rows(way, ceiling)]
        speed, drift = num_bytes / ceiling / 1e9, bench.ceiling(way) / ceiling - 1
        lines.append(f"One copy {way}: {speed:.2f} GB/s, and {drift:+.1%} of its time after all the others.")
    lines.append(bench.submission())
    text = "\n".join([*lines, *bench.concurrent_with_model(), "", *markdown(rows), ""])
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
