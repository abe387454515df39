"""Prefixes by worker: the KV events of many workers, folded into one tree for routers."""
