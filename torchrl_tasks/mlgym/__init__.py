"""MLGym's research tasks."""
