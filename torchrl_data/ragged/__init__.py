"""Token rows of unequal length: packed, padded, and as entries of a batch."""
