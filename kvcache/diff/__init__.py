"""Two logs side by side: where they first say something else, and how their requests were reused.

Both read batches in order, and keep of each log no more than they still need of it.
"""

from kvcache.diff.divergence import Divergence, Place, first_divergence
from kvcache.diff.reuse import Admitted, Change, Only, ReuseDifference, compare_reuse
from kvcache.diff.settings import ChangedSetting, changed_settings

__all__ = [
    "Admitted",
    "Change",
    "ChangedSetting",
    "Divergence",
    "Only",
    "Place",
    "ReuseDifference",
    "changed_settings",
    "compare_reuse",
    "first_divergence",
]
