"""How many blocks would be reused at every size of the cache, and at best: from the prompts alone."""
