"""The cache, or a recorder of theirs, inside other libraries: a package for each, with an extra of the same name."""
