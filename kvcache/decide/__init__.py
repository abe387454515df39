"""Decisions: read the state and produce the events that shall happen."""
