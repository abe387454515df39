"""The types of events, by what they are about."""
