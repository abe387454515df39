"""The benchmark of copies, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import copies
from cuda_ops.simulated import SimulatedGpu
from cuda_ops.torch_copier import TorchCopier
from tests.support.engines.storage import pair


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BLOCKS", (16 * copies.KIB, 64 * copies.KIB))
    monkeypatch.setattr(copies, "REPETITIONS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.mark.usefixtures("small")
def test_a_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each size, way and copier has a row, with the share of one copy, and what was measured on stands above."""
    path = tmp_path / "results" / "copies.md"
    assert copies.main(["--device", "cpu", "--mib", "1", "--endure", "0.2", "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert "every byte right" in text
    assert f"torch {torch.__version__}" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 16", "| 64"))]
    assert len(rows) == 3 * 4 * 2
    assert {row[1] for row in rows} == {copies.OFFLOAD, copies.ONBOARD, copies.BOTH, copies.INSIDE}
    assert all(row[4].endswith("%") and float(row[3]) >= 0 for row in rows)  # a busy machine has 0.00 GB/s


def test_ceilings_are_one_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """More memory than is page-locked at once is refused: a copy must not cross that edge."""
    with pytest.raises(SystemExit):
        copies.main(["--device", "cpu", "--mib", "1025"])
    assert "argument --mib: accepted: 1 to 1024" in capsys.readouterr().err


def test_a_copy_per_block_uses_both_directions_at_once() -> None:
    """Each way has a stream of its own, as in the managers that it stands for."""
    used: list[Any] = []

    class Noting(SimulatedGpu):
        @contextmanager
        def on(self, stream: Any) -> Iterator[None]:
            used.append(stream)
            with super().on(stream):
                yield

    levels = (torch.zeros(4, 1, 1, 8, dtype=torch.uint8), torch.ones(4, 1, 1, 8, dtype=torch.uint8))
    loop = copies.BlockLoop([[copies.Storage(levels)]], Noting(0))
    loop.submit([pair(0, 1, (0, 1)), pair(2, 3, (1, 0))]).wait()
    assert len(set(used)) == 2
    assert [level[:, 0, 0, 0].tolist() for level in levels] == [[0, 0, 0, 1], [1, 0, 1, 1]]


@pytest.mark.usefixtures("small")
def test_wrong_bytes_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copier that leaves out a pair is found while it copies at random."""
    submit = TorchCopier.submit

    def forgets(self: TorchCopier, batch: Any) -> Any:
        for copy in batch:
            copy.source[0] = copy.source[1]
        return submit(self, batch)

    monkeypatch.setattr(TorchCopier, "submit", forgets)
    with pytest.raises(AssertionError, match="wrong bytes"):
        copies.Bench(torch.device("cpu"), 1 << 20).endure(30, block=16 * copies.KIB)
