"""Copies of bytes between the pools' tensors.

The modules are imported one by one (`cuda_ops.copier`, `cuda_ops.hazards`, ...), because only some of
them need torch: importing this package, the protocol or the scheduling does not.
"""

KVCACHE_PACKAGE = "kvcache"
"""Marks this `cuda_ops` as kvcache's own."""
