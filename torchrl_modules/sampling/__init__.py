"""Sampling: its parameters, several responses per prompt, and what warps the logits."""
