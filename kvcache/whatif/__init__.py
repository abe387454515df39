"""The recorded requests again, under other settings and other orders of eviction."""
