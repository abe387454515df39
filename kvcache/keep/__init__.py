"""What is kept of a log: snapshots of its state, and, behind the oldest of them, its segments; whether it is whole.

All of it works on files of which the writer is done, in a process of its own, so the engine pays nothing for it: the
fold that makes a snapshot takes as long as a replay, and in the engine's process it would take that from the engine.
"""
