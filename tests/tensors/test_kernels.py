"""The kernel in Triton's interpreter, which needs no GPU: a release of Triton has a directory of its own."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuda_ops.copier import Copy
from cuda_ops.dma import DmaCopier
from cuda_ops.hazards import schedule
from cuda_ops.probe import Probed, with_kernel
from cuda_ops.simulated import SimulatedGpu
from cuda_ops.torch_copier import TorchCopier
from tests.support.engines.storage import TOKENS, Storage, storage
from tests.support.needs import program
from tests.support.places import ROOT
from tests.support.releases import TRITON

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
OUTER = ("test_all_with_triton", "test_it_compiles_for_a_gpu")
"""Tests that start a process with Triton."""
interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed")


@pytest.mark.needs(f"triton-{TRITON}")
@pytest.mark.timeout(300)
def test_all_with_triton() -> None:
    """The other tests of this file, where Triton is found."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TESTS"))
    }
    path = os.pathsep.join([str(ROOT), program(f"triton-{TRITON}")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
        | {"PYTEST_ADDOPTS": " ".join(f"--deselect tests/tensors/test_kernels.py::{each}" for each in OUTER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^[4-9] passed", done.stdout, re.MULTILINE), done.stdout[-1000:]


@pytest.mark.needs(f"triton-{TRITON}")
@pytest.mark.timeout(300)
def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Once for any number of blocks and tokens, to accesses as wide as a GPU has; it runs on that of the tensors."""
    release, ptxas = program(f"triton-{TRITON}"), tmp_path / "ptxas"
    shutil.copy(Path(release) / "triton" / "backends" / "nvidia" / "bin" / "ptxas", ptxas)
    ptxas.chmod(0o755)  # which pip forgets
    places = {"TRITON_PTXAS_PATH": str(ptxas), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_for_gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), release])} | places,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["1", "1", "ld.global.b32", "ld.global.v2.b64", "st.global.v2.b64"]


def copies_into_primary(dice: random.Random) -> list[Copy]:
    found = []
    for _ in range(6):
        levels = dice.choice([(0, 0), (0, 0), (1, 0), (0, 1)])
        both = np.array(dice.sample(range(5), 4), np.int32).reshape(2, -1)
        tokens = dice.choice([None, *range(1, TOKENS + 1)])
        found.append(Copy(*levels, both[0], both[1], tokens))
    return found


@interpreted
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_random_programs_leave_the_bytes_of_the_torch_copier(layout: str, dtype: str) -> None:
    """Copies inside primary and of parts into it are the kernel's, all others the driver's; every byte is the same."""
    from cuda_ops import kernels

    asked: list[int | None] = []

    def kernel(source: torch.Tensor, target: torch.Tensor, pairs: Any, num_tokens: int | None) -> None:
        asked.append(num_tokens)
        kernels.copy_blocks(source, target, pairs, num_tokens)

    dice, gpu = random.Random(f"{layout} {dtype}"), SimulatedGpu(0)
    for _ in range(3):
        pools = [storage(heads, layout, getattr(torch, dtype)) for heads in (1, 3)]
        copied = [Storage(tuple(each.clone() for each in pool.levels), pool.token_dim) for pool in pools]
        by_kernel = DmaCopier([copied], gpu, gpu, kernel=kernel)
        program = copies_into_primary(dice)
        for indices in schedule(program):
            batch = [program[index] for index in indices]
            TorchCopier([pools]).submit(batch)
            by_kernel.submit(batch).wait()
        for pool, other in zip(pools, copied, strict=True):
            for right, found in zip(pool.levels, other.levels, strict=True):
                assert torch.equal(right.view(torch.uint8), found.view(torch.uint8))
    assert gpu.calls
    assert None in asked
    assert set(asked) - {None}


@interpreted
def test_long_rows_take_several_tiles() -> None:
    """A row of more words than a program moves at once, whose last tile is not full."""
    from cuda_ops.kernels import copy_blocks

    source = torch.randint(0, 256, (3, 2, 5, 8 * 700 + 8), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_blocks(source, target, np.array([[2, 0], [0, 1]], np.int32), 4)
    assert torch.equal(target[:2, :, :4], source[[2, 0], :, :4])
    assert not target[:2, :, 4:].any()
    assert not target[2].any()


def test_a_kernel_is_tried_before_it_is_used() -> None:
    """Where Triton is missing, or copies something else, the reason is said; else it is taken."""
    host, there = torch.zeros(8192, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    found = with_kernel(Probed(SimulatedGpu(0), "lists"), host, there)
    if INTERPRETED:
        assert found.kernel is not None
        assert found.why == "lists; Triton kernel inside the GPU"
    else:
        assert found.kernel is None
        assert found.why.startswith("lists; no Triton kernel (")
