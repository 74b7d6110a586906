"""``TextEnvironment``: tools called in plain text."""
