"""Recording what other engines tell: their live streams come in, and a log of kind `feed` comes out.

From that, as from any log, `kvcache.publish` feeds routers.
"""
