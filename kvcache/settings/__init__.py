"""Where settings are given (files, variables, code), what is wrong with them in words, and their JSON schema."""
