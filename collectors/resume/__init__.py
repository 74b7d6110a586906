"""Parts of a run that goes on where it was: data, random numbers, sharded models, identity."""
