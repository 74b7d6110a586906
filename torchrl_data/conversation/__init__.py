"""Append-only records of conversations: messages, tokens and who wrote them."""
