"""The cache, or a recorder, inside other libraries: a package for each, with an extra of the same name."""
