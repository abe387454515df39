"""Retention of a log: snapshots of its state, and its segments after the oldest of them; verification and repair.

All of it works on completed files, in a process of its own, so the engine pays nothing for it: the fold that makes a
snapshot takes as long as a replay, and in the engine's process would take that time from the engine.
"""
