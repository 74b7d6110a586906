"""The chat environment and the course of its episodes."""
