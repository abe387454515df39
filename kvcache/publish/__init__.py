"""Publishing a log from a process of its own: sinks that follow what another process writes.

The log is of a cache, written by a manager, or of what other engines told, written by `kvcache.tap`.
"""
