"""How a Transformers model continues rows, one token at a time."""
