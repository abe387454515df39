"""A certificate that signs itself, for a server on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.needs import program


def self_signed(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """Certificate and key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = [
        program("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
