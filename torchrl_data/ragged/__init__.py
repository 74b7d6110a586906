"""Ragged rows: packed, padded and nested."""
