"""Replay of recorded requests under other settings and eviction orders."""
