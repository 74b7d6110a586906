"""The entries of a batch: prompt, response and full, as text, tokens and messages."""
