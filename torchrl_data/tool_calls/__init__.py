"""Tool calls in what a model wrote: formats, parsers, records."""
