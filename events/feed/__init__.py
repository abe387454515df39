"""The part of a cache visible to routers: a fold over its events, and its changes.

This is the outgoing direction, for a cache of our own manager. Events published by other engines come in as
`events.types`, and are folded in `events.subscribe.workers`.
"""

from events.feed.fold import Feed as Feed
