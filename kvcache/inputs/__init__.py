"""What callers pass, checked, as plain values."""
