"""What a log's cache did, as one page for a browser, which needs nothing else."""
