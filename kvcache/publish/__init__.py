"""Publishing a log from a process of its own: sinks that follow what another process writes."""
