"""Metrics of a live cache for Prometheus: what its events say, and what its process knows."""
