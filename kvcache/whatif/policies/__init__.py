"""Orders of eviction to compare: our own, others that are known, and two that know what comes."""
