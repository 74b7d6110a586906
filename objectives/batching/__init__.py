"""From rows to micro-batches: packing, accumulation, and a gate for non-finite values."""
