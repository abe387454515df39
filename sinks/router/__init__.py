"""The feed for KV-aware load balancers: its pace, its numbers, and the sockets that carry it."""
