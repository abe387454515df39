"""Report on a log's cache as a single self-contained HTML page."""
