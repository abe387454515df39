"""The other end of a router feed: sockets, order, and what is known then."""
