"""Critics: models that say what a state is worth."""
