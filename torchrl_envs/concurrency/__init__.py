"""Many calls of users' code at once: threads, an event loop, deadlines, and closing."""
