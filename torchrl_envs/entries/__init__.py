"""Entries that environments write: rewards, observations, padded tokens, whole trajectories."""
