"""Conversations for people: in a terminal, as HTML, and as the text that grew in an episode."""
