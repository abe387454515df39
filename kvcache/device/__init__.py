"""Bytes on their way: copies that events ask for, and the memory there is."""
