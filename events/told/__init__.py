"""What other engines tell of their caches: as events of a log, and who holds what by them."""
