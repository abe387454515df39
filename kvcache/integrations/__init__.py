"""The cache inside other libraries: a package for each, with an extra of the same name."""
