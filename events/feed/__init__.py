"""What routers may see of a cache: a fold over its events, and what it tells."""

from events.feed.fold import Feed as Feed
