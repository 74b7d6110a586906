"""Weights of an update: those that an engine expects, those that it is given, and adapters."""
