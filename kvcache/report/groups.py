"""Reasons in groups that a picture can tell apart, and colours that colour-blind people can."""

from __future__ import annotations

from typing import NamedTuple

from kvcache.audit.reasons import EVICTIONS, LOSSES, Reason

BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, YELLOW = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#b3a500",
)
"""After Okabe and Ito; the yellow is darker, to be seen on white."""
GREY, PALE = "#8c8c8c", "#c4c4c4"


class GroupRow(NamedTuple):
    """Reasons of which a picture says the same."""

    name: str
    color: str
    reasons: tuple[Reason, ...]


GROUPS = (
    GroupRow("reused from primary", BLUE, (Reason.PRIMARY, Reason.PARTIAL)),
    GroupRow("reused from secondary", SKY, (Reason.SECONDARY,)),
    GroupRow("loaded from outside", GREEN, (Reason.EXTERNAL,)),
    GroupRow(
        "computed again: evicted",
        VERMILION,
        EVICTIONS,
    ),
    GroupRow(
        "computed again: cleared or lost",
        PURPLE,
        LOSSES,
    ),
    GroupRow("being computed by another", ORANGE, (Reason.SAME_STEP, Reason.BEING_COMPUTED)),
    GroupRow(
        "could not be served",
        YELLOW,
        (
            Reason.NOT_SERVABLE,
            Reason.LAST_HIT,
            Reason.NOT_REUSED,
            Reason.OUT_OF_WINDOW,
            Reason.OTHER_NAMESPACE,
            Reason.REUSE_OFF,
            Reason.UNKNOWN,
        ),
    ),
    GroupRow("never seen before", GREY, (Reason.NEVER_SEEN,)),
    GroupRow("end of the prompt", PALE, (Reason.LAST_TOKEN, Reason.UNALIGNED)),
)
"""Every reason is in one of them."""


def color_of(reason: Reason) -> str:
    """The colour of its group."""
    return next(group.color for group in GROUPS if reason in group.reasons)
