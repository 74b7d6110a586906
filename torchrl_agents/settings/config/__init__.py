"""Settings in files that all recipes have: Hydra finds them by this package's name."""
