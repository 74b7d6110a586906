"""MLGym's tasks."""
