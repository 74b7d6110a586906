"""Chat templates, and how conversations become tokens."""
