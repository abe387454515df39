"""Recording of events: the journal, log and sinks, recent events and counters."""
