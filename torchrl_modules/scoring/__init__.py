"""Log-probs of given tokens, packed, with shared prompts computed once."""
