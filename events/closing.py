"""Base class of objects that a `with` statement closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closed at the end of a `with` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
