"""Calls of an engine to a manager: commands on running sequences, and queries."""
