"""Why prompt tokens were computed: a log as a history of block contents, and each admission explained by it."""
