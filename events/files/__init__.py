"""Files that are ours alone, even in directories that others may write."""
