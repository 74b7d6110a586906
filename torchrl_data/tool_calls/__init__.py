"""Tool calls in the text of a model: every format in which they are written, read strictly."""
