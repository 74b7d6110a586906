"""The audit of tasks: scripted agents that deserve nothing do them, and rewards are compared."""
