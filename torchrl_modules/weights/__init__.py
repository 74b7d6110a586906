"""Weights on their way to an engine: their state, buckets and transports."""
