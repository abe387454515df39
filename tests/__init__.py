"""Proofs of what the packages promise; a directory per package, a file per subject."""
