"""Spans of text that two tokenizers cut differently."""
