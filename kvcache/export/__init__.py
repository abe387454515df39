"""A log as tables for other programs: their schema, and how they are written."""
