"""Environments that TorchRL's users know by name."""
