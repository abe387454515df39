"""What other engines told of their caches, by a log of kind `feed`: who holds what, and what routers are told of that.

The events are in `events.types`; `kvcache tap` records them. Of a cache of our own manager, `events.feed` is what
routers are told.
"""
