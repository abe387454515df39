"""The state of the cache, and how events change it: one way for live managers and for replay."""
