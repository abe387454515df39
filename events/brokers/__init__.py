"""A feed that goes by a broker: where it is, its records there, and how each kind of broker is read."""
