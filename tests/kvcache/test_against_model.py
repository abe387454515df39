"""The manager beside the model: random commands, and after each of them everything that both of them know is compared.

Along the way a second state folds the events, and from some point on a second manager that began with an export or
with a fold gets the same commands and has to emit the same events. At the end the log is replayed.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
)

from kvcache.config import KVCacheConfig
from tests.oracles.machine import ManagerAgainstModel, explore
from tests.support.engines import strategies


class InputsAgainstModel(ManagerAgainstModel):
    """The same, always with cross attention."""

    @initialize(settings=strategies.configs(cross=st.just(0.5)))
    def create(self, settings: KVCacheConfig) -> None:
        self.begin(settings)


class WindowsAgainstModel(ManagerAgainstModel):
    """The same, always with windows."""

    @initialize(settings=strategies.configs(strategies.windows()))
    def create(self, settings: KVCacheConfig) -> None:
        self.begin(settings)


def test_manager_does_what_the_model_does() -> None:
    """After any commands both hold the same, say the same, and gave up the same blocks in the same order."""
    explore(40, 40)


def test_cross_attention_does_what_the_model_does() -> None:
    """The same where each request has an encoder's input."""
    explore(6, 40, InputsAgainstModel)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_cross_attention_does_what_the_model_does_for_long() -> None:
    """The same for 50,000 commands."""
    explore(1250, 40, InputsAgainstModel)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("_part", range(10))
def test_manager_does_what_the_model_does_for_long(_part: int) -> None:
    """The same for minutes, in parts for several workers."""
    explore(500, 60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_windows_do_what_the_model_does_for_long() -> None:
    """Windows for 50,000 commands."""
    explore(1250, 40, WindowsAgainstModel)
