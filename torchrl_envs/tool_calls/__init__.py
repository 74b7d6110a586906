"""Calls of tools: schemas, signatures, results."""
