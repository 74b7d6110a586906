"""Models, as the settings describe them: where they are read, loaded, adapted and sampled."""
