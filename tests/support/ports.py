"""Free ports of this machine, each given to one test only, also when several test processes run at once."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_CLAIMS = Path(tempfile.gettempdir()) / f"kvcache-test-ports-{os.getuid()}"
_claimed: list[int] = []
"""Open descriptors whose locks keep the ports for this process until it ends."""


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens, and which no other call returns while this process lives.

    Ports lie below the range of outgoing connections: a connection to a port without a listener may otherwise
    connect to itself, and then holds the port.
    """
    _CLAIMS.mkdir(exist_ok=True)
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20_000, 32_000)
        claim = os.open(_CLAIMS / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(claim)
            continue
        _claimed.append(claim)
        return port
