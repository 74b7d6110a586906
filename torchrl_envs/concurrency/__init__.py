"""Many calls at once: threads, an event loop, deadlines, and closing."""
