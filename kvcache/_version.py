"""The version, in one place: the build reads it here, and logs name it as the software that wrote them."""

__version__ = "0.1.0"
