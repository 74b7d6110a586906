"""Conversations for people: in the terminal and as HTML."""
