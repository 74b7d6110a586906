"""Everything about SGLang: its server, started here or running, and its weights."""
