"""Decisions: what reads the state and says which events shall happen."""
