"""Agents that own their loop: programs that ask a model over OpenAI's protocol."""
