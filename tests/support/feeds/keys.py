"""Pairs of keys in files, as an operator makes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq.auth

from events.subscribe.sockets import Curve


@dataclass(frozen=True)
class Keys:
    """A directory with a pair for each name, and one with the public keys of those that are let in."""

    home: Path

    def make(self, *names: str) -> None:
        before = os.umask(0o077)
        try:
            for name in names:
                zmq.auth.create_certificates(self.home, name)
        finally:
            os.umask(before)

    def allow(self, name: str) -> None:
        (self.clients / f"{name}.key").write_bytes(self.public(name).read_bytes())

    @property
    def clients(self) -> Path:
        path = self.home / "clients"
        path.mkdir(exist_ok=True)
        return path

    def public(self, name: str) -> Path:
        return self.home / f"{name}.key"

    def secret(self, name: str) -> Path:
        return self.home / f"{name}.key_secret"

    def calls(self, name: str, server: str) -> Curve:
        """Who connects to a server."""
        return Curve.read(self.secret(name), server=self.public(server))

    def serves(self, name: str) -> Curve:
        """Who lets in those that are allowed."""
        return Curve.read(self.secret(name), clients=self.clients)
