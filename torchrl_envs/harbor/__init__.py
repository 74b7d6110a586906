"""Harbor's tasks: what their folders hold, the machines in which they run, and their tests."""
