"""What routers may see of a cache: a fold over its events, and what it tells.

This is the way out, for a cache of our own manager. What other engines told of theirs comes in as
`events.types`, and is folded in `events.subscribe.workers`.
"""

from events.feed.fold import Feed as Feed
