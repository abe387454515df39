"""The kinds of groups of layers that the state has."""

from __future__ import annotations

from kvcache.fold.full_group import FullGroup
from kvcache.fold.sliding_group import SlidingGroup

AnyGroup = FullGroup | SlidingGroup
