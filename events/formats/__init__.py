"""The formats in which other software reads events."""
