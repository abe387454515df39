"""The shapes in which others read events."""
