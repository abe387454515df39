"""A span for each request, for OpenTelemetry: what events say of it, and what sends that away."""
