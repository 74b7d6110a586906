"""A run without its weights."""
