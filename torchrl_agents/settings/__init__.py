"""Settings of recipes: their schema, the files that all have, the command line and its help."""
