"""Models that are asked and not trained: judges, simulated users, other agents of an episode."""
