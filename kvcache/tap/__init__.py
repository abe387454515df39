"""Recording of other engines' events: live streams in, a log of kind `feed` out.

`kvcache.publish` feeds routers from it, as from any log.
"""
