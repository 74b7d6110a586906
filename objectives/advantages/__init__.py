"""Advantages, computed on the way into a replay buffer."""
