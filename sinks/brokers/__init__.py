"""The feed for routers by way of brokers: what is written to a stream, and how each kind of broker takes it."""
