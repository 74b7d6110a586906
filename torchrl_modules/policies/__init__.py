"""Policies: modules that write a turn into a batch, or score it."""
