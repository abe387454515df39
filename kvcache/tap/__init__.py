"""Records what engines tell of their caches into a log of kind `feed` ([docs/tap.md])."""
