"""What every fold of a cache's events makes of its sequences: the tokens of blocks that these compute."""

from __future__ import annotations

import pytest

from events.feed.changes import Cached, Stored
from events.feed.fold import Feed
from events.feed.inventory import Inventory
from events.ids import Handle
from events.types import (
    AnyEvent,
    CacheCreated,
    EventBatch,
    SequenceForked,
    SequenceRewound,
    TokensAppended,
)
from tests.support.columns import pack_i32, pack_i64
from tests.support.feeds.batches import FULL, SIZE, added, names, stored, tokens

SECOND = [102, 103]
"""The tokens of the prompt's second block."""


def computed(fold: Feed | Inventory, *events: AnyEvent) -> list[list[int]]:
    """The tokens of each row of blocks that the last of these events tells of."""
    fold.fold(EventBatch(0, 0, (CacheCreated("{}", SIZE, (FULL,), "xxh3_64", 8, "c"), *events[:-1])))
    changes = fold.fold(EventBatch(1, 0, events[-1:]))
    reported = [
        change.tokens if isinstance(change, Stored) else change.spelled.tokens
        for change in changes
        if isinstance(change, Stored | Cached)
    ]
    return [memoryview(each).cast("i").tolist() for each in reported]


def forked(handle: int, child: int) -> SequenceForked:
    return SequenceForked(handle=Handle(handle), child=Handle(child), request_id=child)


def rewound(handle: int, num_tokens: int) -> SequenceRewound:
    return SequenceRewound(handle=Handle(handle), num_tokens=num_tokens, freed=(b"",))


def sampled(handle: int, token: int) -> TokensAppended:
    return TokensAppended(handles=pack_i64([handle]), counts=b"", tokens=pack_i32([token]))


@pytest.mark.parametrize("kind", [Feed, Inventory])
def test_a_rewound_sequence_computes_other_tokens(kind: type[Feed | Inventory]) -> None:
    """Behind those that are left come the ones that are sampled then, not those that were taken back."""
    begun = added(1, 2), stored(0, [0])
    assert computed(kind(), *begun, stored(1, [1])) == [SECOND]
    assert computed(kind(), *begun, rewound(1, 3), sampled(1, 900), stored(1, [1])) == [[SECOND[0], 900]]


@pytest.mark.parametrize("kind", [Feed, Inventory])
def test_a_branch_has_tokens_of_its_own(kind: type[Feed | Inventory]) -> None:
    """It begins with those of the other sequence, which does not change it any more; nor does it change that one."""
    begun = added(1, 2), stored(0, [0]), forked(1, 2)
    of_child = stored(1, [1], handle=2, keys=names(1))
    assert computed(kind(), *begun, rewound(1, 3), sampled(1, 900), of_child) == [SECOND]
    assert computed(kind(), *begun, rewound(2, 3), sampled(2, 900), of_child) == [[SECOND[0], 900]]
    assert computed(kind(), *begun, rewound(2, 3), sampled(2, 900), stored(1, [1])) == [SECOND]


def test_the_prompt() -> None:
    """What the tests above take for its second block."""
    assert memoryview(tokens(1, 1)).cast("i").tolist() == SECOND
