"""Checkpoints on the disk: written whole or not at all, verified when they are read, no pickle."""
