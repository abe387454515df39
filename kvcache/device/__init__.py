"""Moving bytes: copies requested by events, and the available memory."""
