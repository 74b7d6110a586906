"""Games for two: against players that are written here, or the policy against itself."""
