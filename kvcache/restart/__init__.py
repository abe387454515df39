"""Warm restarts: what a cache finds again when its process has died."""
