"""Tasks: an environment, its data and, where a model starts from nothing, demonstrations."""
