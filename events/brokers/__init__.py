"""A feed through a broker: its address, its records there, and a reader for each kind of broker."""
