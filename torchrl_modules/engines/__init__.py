"""What an engine is, the engine over a Transformers model, and watching engines."""
