"""The receiving end of a router feed: sockets, order, and the resulting state."""
