"""Rows of data: where they come from, in what order, and which are fit to be used."""
