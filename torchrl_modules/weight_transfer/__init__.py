"""Transfer of weights to another process: in buckets, over a process group or a shared file."""
