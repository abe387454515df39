"""Who has which prefix: the KV events of many workers, folded into one tree that routers ask."""
