"""``History``, the messages of a batch as a TensorClass."""
