"""Transforms that add to a chat environment; one a file."""
