"""Settings from variables and files, what is wrong with them in words, and their JSON schema."""
