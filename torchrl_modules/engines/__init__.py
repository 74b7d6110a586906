"""Engines: their protocol, the engine over a Transformers model, and watching engines."""
