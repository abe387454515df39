"""Publishing of a log from a separate process: sinks that follow a log written by another process.

The log is that of a cache, written by a manager, or that of other engines' events, written by `kvcache.tap`.
"""
