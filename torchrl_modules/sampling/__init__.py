"""Sampling: its parameters, the distribution that tokens are drawn from, and where a turn stops."""
