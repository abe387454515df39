"""Releases of Transformers beside the installed one, and Triton: ``python -m tests.support.releases`` installs those
missing.

Each has a directory of its own, without torch and whatever else the installed one has in a version that fits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tests.support.needs import RELEASES

OLDER_HUB, OLDER_TOKENIZERS = "huggingface-hub<1", "tokenizers<=0.23.0"
TESTED = {
    "4.56.0": (OLDER_HUB, OLDER_TOKENIZERS),
    "4.57.6": (OLDER_HUB, OLDER_TOKENIZERS),
    "5.0.0": ("huggingface-hub<2", OLDER_TOKENIZERS),
    "5.23.0": (),
    "5.24.0": (),
}
"""The oldest and the newest, the last and first of two major ones, and the last that knows no `cache=`; each with what
it needs in other versions."""
OTHERS = [release for release in TESTED if release != version("transformers")]
"""All but the installed one, which has the tests themselves."""


TRITON = "3.6.0"
"""Of which only the interpreter runs: it needs no GPU."""


def install(name: str, release: str, others: Sequence[str] = ()) -> None:
    """Install a release, unless it is there; the directory gets its name when it is whole."""
    directory, unfinished = RELEASES / f"{name}-{release}", RELEASES / "unfinished"
    if directory.exists():
        return
    packages = [f"{name}=={release}", *others]
    options = ["-qq", "--disable-pip-version-check", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(unfinished), *packages], check=True
    )
    unfinished.rename(directory)


if __name__ == "__main__":
    for each in OTHERS:
        install("transformers", each, TESTED[each])
    if sys.platform == "linux":
        install("triton", TRITON)
